"""Checkpoints that many tests share, and a place for caches that is not somebody's home."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before anything imports the libraries that read them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["chromium", "sessions"]

if TYPE_CHECKING:
    from tiny_models import TinyModel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-identity",
        action="store_true",
        help="compare the engine with transformers for every combination at batch 1 (hours on a laptop)",
    )


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Packs of this test session go here."""
    directory = tmp_path_factory.mktemp("specviz-cache")
    before = os.environ.get("SPECVIZ_CACHE")
    os.environ["SPECVIZ_CACHE"] = str(directory)
    yield directory
    if before is None:
        del os.environ["SPECVIZ_CACHE"]
    else:
        os.environ["SPECVIZ_CACHE"] = before


@pytest.fixture(scope="module", autouse=True)
def no_earlier_garbage() -> None:
    """Before each file: Gradio leaves event loops in cycles, and a test that counts open files must not see them go."""
    gc.collect()


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The model that comes with the project."""
    from engine.config import EMBEDDED_MODEL

    return EMBEDDED_MODEL


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """tiny_model(name, **options) → a saved TinyModel, made once; options are those of `save_model`."""
    from tiny_models import CONFIGS, save_model

    made: dict[tuple, TinyModel] = {}

    def make(name: str, **options) -> TinyModel:
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp(name), CONFIGS[name](), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A Llama: no experts."""
    from tiny_models import llama_config, save_model

    return save_model(tmp_path_factory.mktemp("llama"), llama_config())
