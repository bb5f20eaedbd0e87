"""Sessions with an engine that computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeLoader  # noqa: E402

from specviz.session import Session  # noqa: E402


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def session(loader: FakeLoader) -> Iterator[Session]:
    session = Session(loader)
    yield session
    session.close()
