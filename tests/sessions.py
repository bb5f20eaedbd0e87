"""Sessions with an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeLoader

from engine.serve.session import Session


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def session(loader: FakeLoader) -> Iterator[Session]:
    session = Session(loader)
    yield session
    session.close()
