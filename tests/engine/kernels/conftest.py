"""The compiled library under test, one variant after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_cases import VARIANTS

from engine.kernels import native as native_module
from engine.kernels.native import Absent, Native, native

#: A library to test instead of the one that `native()` builds: test_instrumented.py runs these tests again with it.
OTHER_LIBRARY = os.environ.get("SPECVIZ_TEST_LIBRARY")


@pytest.fixture(scope="module", autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    """The references are many small operations, whose threads wait for each other in busy loops: on two cores that
    others use as well, 0.2 seconds of them became 16."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def library(cache_directory: Path) -> Native:
    """The library, whatever SPECVIZ_KERNELS says; built here if need be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECVIZ_KERNELS", "auto")
        if OTHER_LIBRARY:
            patch.setattr(native_module, "build", lambda: Path(OTHER_LIBRARY))
        found = native()
    if isinstance(found, Absent):
        pytest.skip(f"no compiled kernels: {found.reason}")
    return found


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, library: Native) -> Iterator[str]:
    """The variant that computes, with two threads; those that this machine cannot run are skipped."""
    if request.param not in library.variants:
        pytest.skip(f"{request.param} does not run on this machine")
    before, threads = library.variant, library.library.specviz_threads()
    library.use(request.param)
    library.set_threads(2)
    yield request.param
    library.use(before)
    library.set_threads(threads)
