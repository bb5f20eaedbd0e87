"""The kernel tests once more, in a build that watches: sanitizers, and emulated tiles for the variant `amx`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.build import build
from engine.kernels.native import Native

HERE = Path(__file__).resolve().parent
TILES = "-O1 -DSPECVIZ_EMULATE_AMX"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"


def run_again(flags: str, *selection: str, examples: int, **environment: str) -> None:
    """Runs the selected tests of this directory against a library built with `flags`, in a process of its own."""
    if "SPECVIZ_TEST_LIBRARY" in os.environ:
        pytest.skip("this is that process")
    # Built here, because compilers that run under a preloaded sanitizer take ten times as long.
    settings = {"SPECVIZ_TEST_LIBRARY": str(build(flags.split())), "SPECVIZ_TEST_EXAMPLES": str(examples)}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *selection, str(HERE)]
    command += [f"--ignore={HERE / name}" for name in ("test_build.py", "test_kernel_threads.py")]
    whole = {**os.environ, **settings, **environment}
    done = subprocess.run(command, cwd=HERE.parents[2], env=whole, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert " passed" in done.stdout and "error" not in done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles belong to x86-64")
def test_tiles(library: Native) -> None:
    """Everything that is asked of the other variants, of `amx`, with a model of its instructions in software."""
    if "avx512bf16" not in library.variants:
        pytest.skip("the emulated variant needs AVX-512 with bfloat16")
    # Attention uses no tiles.
    run_again(TILES, "-k", "amx or tiles", f"--ignore={HERE / 'test_attention_kernel.py'}", examples=10)


def test_no_sanitizer_finds_anything(library: Native) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer over every operator and variant."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    # libstdc++ beside it: the sanitizer looks for the real __cxa_throw while Python, which is C, starts.
    wanted = ("libasan.so", "libstdc++.so")
    paths = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60).stdout.strip()
        for name in wanted
    ]
    if not all(os.path.isabs(path) for path in paths):
        pytest.skip("no libasan here")
    run_again(
        f"{SANITIZERS} {TILES}",
        examples=3,
        LD_PRELOAD=" ".join(paths),
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
