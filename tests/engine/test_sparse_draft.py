"""Whole runs whose draft lives on what is resident: it moves nothing itself, and leaves nothing held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from recorded_runs import Recording, record
from tiny_models import PROMPTS

from engine import events
from engine.config import EngineConfig, GenerationConfig, LinkConfig
from engine.engine import Engine

BATCH = PROMPTS[:4]


@pytest.fixture(scope="module", params=("sparse", "sparse-1"))
def engine(tiny_model, request) -> Iterator[Engine]:
    """Each transfer takes longer than a draft pass, so that prefetches arrive in the middle of later passes."""
    directory = str(tiny_model("mixtral").directory)
    link = LinkConfig("emulated", gbps=0.01, latency_us=500)
    engine = Engine.load(EngineConfig(model=directory, draft=request.param, link=link))
    yield engine
    engine.close()


def run(engine: Engine, prefetch: str, slots: int) -> Recording:
    engine.cache.reset()
    knobs = engine.knobs(GenerationConfig(k=4))
    knobs.set("prefetch", prefetch)
    knobs.set("slots", slots)
    return record(engine, list(BATCH), knobs, max_new_tokens=24)


def queued_under_the_draft(recording: Recording) -> list[events.Transfer]:
    drafts = [(event.start, event.draft_end) for event in recording.of(events.Round)]
    return [t for t in recording.of(events.Transfer) if any(start < t.queued < end for start, end in drafts)]


@pytest.mark.parametrize("slots", (1, 3))
def test_starts_no_transfer_itself(slots: int, engine):
    recording = run(engine, "none", slots)
    assert recording.results[0]["acceptance_rate"] is not None
    assert queued_under_the_draft(recording) == []
    assert {transfer.cause for transfer in recording.of(events.Transfer)} == {"demand"}


def test_its_routes_are_prefetched(engine):
    started = queued_under_the_draft(run(engine, "draft", 3))
    assert started and {transfer.cause for transfer in started} == {"prefetch"}


@pytest.mark.parametrize("slots", (1, 2, 5))
def test_holds_nothing_afterwards(slots: int, engine):
    """And all counts add up: each request has one answer, each prefetch one end."""
    recording = run(engine, "draft", slots)
    assert not any(slot.pinned for shelf in engine.cache.pool.shelves for slot in shelf.slots)
    stats = engine.cache.stats
    assert stats.hits + stats.late + stats.misses == stats.requests
    ends = (stats.prefetch_used, stats.prefetch_late, stats.prefetch_wasted, stats.prefetch_cancelled)
    assert sum(ends) == stats.prefetched
    settled = sorted(event.id for event in recording.of(events.Settled))
    assert settled == sorted(event.id for event in recording.of(events.Transfer))


def test_takes_no_memory(engine):
    assert run(engine, "draft", 3).results[0]["memory"]["draft"] == 0
