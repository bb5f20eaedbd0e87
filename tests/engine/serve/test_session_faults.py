"""The page's session over the real engine while something breaks: one clear message, and the next request works."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from tiny_models import PROMPTS, greedy

from engine.config import EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.events import RunEnd
from engine.serve.runs import Run, RunSettings
from engine.serve.session import Session

PROMPT, TOKENS = PROMPTS[10], 6


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def expected(model) -> str:
    """Transformers' own text."""
    from transformers import AutoTokenizer

    ids = greedy(model.reference(), model.directory, (PROMPT,), TOKENS)[0]
    return str(AutoTokenizer.from_pretrained(model.directory).decode(ids))


@pytest.fixture
def session() -> Iterator[Session]:
    before = threading.active_count()
    session = Session(viewer_ttl=600)  # nobody watches here, however slow the machine is
    yield session
    session.close()
    assert threading.active_count() == before


@pytest.fixture
def request_text(model, session) -> Callable[[], Run]:
    """Asks as a page would, and waits for the end."""

    def ask() -> Run:
        settings = RunSettings(
            (PROMPT,), EngineConfig(model=str(model.directory)), GenerationConfig(max_new_tokens=TOKENS, k=2)
        )
        run = session.start(settings)
        assert session.wait_idle(60)
        return run

    return ask


def failure(run: Run) -> str:
    """The one message of a run that failed."""
    assert run.hub.end is not None and run.hub.end.status == "failed" and run.hub.end.error
    assert sum('"kind":"run_end"' in line.replace(" ", "") for line in run.hub.lines()) == 1
    assert "\n" not in run.hub.end.error
    return run.hub.end.error


def check_works(run: Run, expected: str) -> None:
    end = run.hub.end
    assert isinstance(end, RunEnd) and (end.status, end.error) == ("finished", None)
    assert end.summary[0]["text"] == expected


def test_a_pack_that_is_cut_off_while_it_is_used_is_built_again(session, request_text, expected):
    check_works(request_text(), expected)
    engine = session._engine
    assert isinstance(engine, Engine)
    engine.cache.reset()
    os.truncate(engine.loaded.source.path(0, 0), 100)
    assert "is cut off" in failure(request_text())
    check_works(request_text(), expected)
    assert session._engine is not engine


def test_a_disk_that_fails_for_a_while(session, request_text, expected, monkeypatch):
    check_works(request_text(), expected)
    session._engine.cache.reset()

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        for _ in range(2):  # while it runs, then while it loads
            assert "Input/output error" in failure(request_text())
    check_works(request_text(), expected)


def test_a_link_that_breaks_down(session, request_text, expected, monkeypatch):
    """Its callback fails, so nobody knows what is in the cache: the engine is loaded anew."""
    check_works(request_text(), expected)
    engine = session._engine
    engine.cache.reset()
    monkeypatch.setattr(engine.cache.pool, "_ended", lambda *ended: {}[ended])
    monkeypatch.setattr(engine.cache.pool, "timeout_s", 0.1)
    assert "the link broke down (KeyError" in failure(request_text())
    check_works(request_text(), expected)
