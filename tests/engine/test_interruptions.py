"""Runs that are stopped, that fail, or whose knobs are moved; and that the next run is none the worse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from recorded_runs import Recording, record
from tiny_models import PROMPTS

from engine import events
from engine.config import EngineConfig, GenerationConfig, LinkConfig
from engine.engine import Engine
from engine.errors import TransferError, UsageError
from engine.events import Event

PROMPT = PROMPTS[10]
#: A stop must be obeyed in this time; a layer of a tiny model takes a millisecond.
STOP_S = 0.25
FAST, SLOW = 100.0, 0.0004


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    directory = str(tiny_model("qwen3_moe").directory)
    engine = Engine.load(EngineConfig(model=directory, link=LinkConfig("emulated", gbps=FAST)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine) -> list[list[int]]:
    return record(engine, [PROMPT], max_new_tokens=24, k=4).ids


@pytest.fixture(autouse=True)
def healthy_afterwards(engine, expected) -> Iterator[None]:
    """Whatever a test did to the engine: the next run is as it should be, and nothing is left over."""
    threads = threading.active_count()
    yield
    knobs = engine.knobs(GenerationConfig())
    for name, value in (("link_gbps", FAST), ("link_latency_us", 0.0)):
        knobs.set(name, value)
    recording = record(engine, [PROMPT], knobs, max_new_tokens=24, k=4)
    assert recording.ids == expected
    assert recording.of(events.RunEnd)[0].status == "finished"
    settled = [event.id for event in recording.of(events.Settled)]
    assert sorted(settled) == sorted(event.id for event in recording.of(events.Transfer))
    assert threading.active_count() <= threads


def stop_at(engine: Engine, here: Callable[[Event], bool]) -> tuple[Recording, float]:
    """Stop at the first event that `here` picks; → the recording, and the seconds until the engine was back."""
    stop, asked = threading.Event(), []

    def on_event(event: Event) -> None:
        if not asked and here(event):
            asked.append(time.perf_counter())
            stop.set()

    knobs = engine.knobs(GenerationConfig(k=4))
    engine.cache.reset()
    recording = record(engine, [PROMPT], knobs, stop, on_event, max_new_tokens=200)
    assert asked, "the run ended before it was asked to stop"
    return recording, time.perf_counter() - asked[0]


STOPS: dict[str, Callable[[Event], bool]] = {
    "prefill": lambda e: isinstance(e, events.Compute) and e.lane == "prefill",
    "draft": lambda e: isinstance(e, events.Compute) and e.lane == "draft" and e.round == 3,
    "verify": lambda e: isinstance(e, events.Compute) and e.lane == "verify" and e.round == 3 and e.op == "experts",
    "between": lambda e: isinstance(e, events.RooflinePoint) and e.round == 3,
    "start": lambda e: isinstance(e, events.RunStart),
}


@pytest.mark.parametrize("where", STOPS)
def test_stop(where: str, engine, expected):
    attempts = [stop_at(engine, STOPS[where]) for _ in range(2)]
    for recording, _ in attempts:
        end = recording.events[-1]
        assert isinstance(end, events.RunEnd) and (end.status, end.error) == ("stopped", None)
        result = recording.results[0]
        assert result["finish_reason"] == "cancelled"
        emitted = [token.id for event in recording.of(events.Round) for token in event.tokens]
        assert emitted == result["token_ids"] == expected[0][: len(emitted)]
    # The better of two: the machine may be busy with something else.
    assert min(seconds for _, seconds in attempts) < STOP_S


def test_stop_while_waiting_for_a_slow_link(engine):
    """An expert takes 23 ms, so the engine waits for one nearly always."""
    attempts = []
    for _ in range(2):
        stop = threading.Event()
        timer = threading.Timer(0.3, lambda stop=stop: (attempts.append(time.perf_counter()), stop.set()))
        knobs = engine.knobs(GenerationConfig())
        knobs.values["link_gbps"] = SLOW
        engine.cache.reset()
        timer.start()
        recording = record(engine, [PROMPT], knobs, stop, max_new_tokens=200, k=4)
        attempts[-1] = time.perf_counter() - attempts[-1]
        timer.join()
        assert recording.events[-1].status == "stopped"
        assert recording.of(events.Stall)
    assert min(attempts) < STOP_S


def test_stopped_before_it_began(engine):
    stop = threading.Event()
    stop.set()
    recording = record(engine, [PROMPT], cancel=stop)
    assert recording.events[-1].status == "stopped" and recording.ids == [[]]
    assert recording.results[0]["decode_tok_s"] in (None, 0)


def test_prompts_that_cannot_run_are_refused_before_any_event(engine):
    for prompts in ([], [""], [PROMPT, "  "], ["word " * 300]):
        recording = Recording()
        with pytest.raises(UsageError):
            record(engine, prompts, into=recording)
        assert recording.events == []


@pytest.mark.parametrize("cause", ("demand", "prefetch"))
def test_a_failed_read_ends_the_run_with_one_error(cause: str, engine, monkeypatch):
    source = engine.loaded.link.source
    honest, reads = source.read, []

    def fail(layer: int, expert: int, offset: int, out: torch.Tensor) -> None:
        reads.append(expert)
        if len(reads) > 12:
            raise OSError("the disk is gone")
        honest(layer, expert, offset, out)

    engine.cache.reset()
    knobs = engine.knobs(GenerationConfig())
    knobs.set("prefetch", "draft" if cause == "prefetch" else "none")
    recording = Recording()
    with monkeypatch.context() as patch:
        patch.setattr(source, "read", fail)
        with pytest.raises(TransferError, match="the disk is gone"):
            record(engine, [PROMPT], knobs, into=recording, max_new_tokens=200, k=4)
    ends = recording.of(events.RunEnd)
    assert [end.status for end in ends] == ["failed"] and recording.events[-1] is ends[0]
    assert "the disk is gone" in ends[0].error and "expert" in ends[0].error
    assert "\n" not in ends[0].error


def test_a_listener_that_fails(engine):
    """Not an error of the engine's kind (a broken pipe, say): it comes through, and the engine stays usable."""

    def on_event(event: Event) -> None:
        if isinstance(event, events.Round):
            raise BrokenPipeError("nobody listens")

    recording = Recording()
    with pytest.raises(BrokenPipeError):
        record(engine, [PROMPT], on_event=on_event, into=recording, k=4)
    assert [end.status for end in recording.of(events.RunEnd)] == ["failed"]


# Knobs.

MOVES = {
    "k": (2, 7),
    "k_max": (4, 3),
    "policy": ("lru", "lfu"),
    "prefetch": ("none", "next-layer"),
    "prefetch_depth": (1, 2),
    "slots": (6, 1),
    "link_gbps": (50.0, 0.5),
    "link_latency_us": (100.0, 0.0),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_knob_takes_effect_at_a_later_round(name: str, engine, expected):
    """Moved while round 2 is over and round 4 is being drafted; acknowledged with the version that the setter got."""
    knobs = engine.knobs(GenerationConfig(k=4))
    start = knobs.values[name]
    asked: dict[int, tuple[int, object]] = {}
    in_effect: dict[int, object] = {}

    def on_event(event: Event) -> None:
        if isinstance(event, events.Round):
            in_effect[event.round] = state(engine, event, name)
        if isinstance(event, events.Round) and event.round == 2:
            asked[knobs.set(name, MOVES[name][0])] = (event.round, MOVES[name][0])
        if isinstance(event, events.Compute) and event.lane == "draft" and event.round == 4 and len(asked) == 1:
            asked[knobs.set(name, MOVES[name][1])] = (event.round, MOVES[name][1])

    recording = record(engine, [PROMPT], knobs, on_event=on_event, max_new_tokens=24, k=4)
    changes = recording.of(events.KnobChange)
    assert [change.version for change in changes] == list(asked)
    assert [change.name for change in changes] == [name] * 2
    assert [(change.old, change.new) for change in changes] == [(start, MOVES[name][0]), MOVES[name]]
    for change in changes:
        assert change.round == asked[change.version][0] + 1
        if name != "k_max":
            assert in_effect[change.round] == change.new
    assert recording.ids[0] == expected[0], "a knob changed the text"


def state(engine: Engine, event: events.Round, name: str) -> object:
    """What the engine really uses."""
    return {
        "k": event.k,
        "k_max": None,
        "policy": engine.policy,
        "prefetch": engine.prefetcher.source,
        "prefetch_depth": engine.prefetcher.depth,
        "slots": engine.cache.slots_per_layer,
        "link_gbps": engine.loaded.link.gbps,
        "link_latency_us": engine.loaded.link.latency_us,
    }[name]


def test_shrinking_the_cache_frees_it_at_once(engine):
    knobs = engine.knobs(GenerationConfig(k=4))
    knobs.values["slots"] = 8

    def on_event(event: Event) -> None:
        if isinstance(event, events.Round) and event.round == 3:
            knobs.set("slots", 1)

    recording = record(engine, [PROMPT], knobs, on_event=on_event, max_new_tokens=24)
    for cache in recording.of(events.CacheState):
        assert cache.slots_per_layer == (8 if cache.round <= 3 else 1)
        assert max(map(len, cache.resident)) <= cache.slots_per_layer
    assert engine.cache.nbytes == engine.cache.capacity_nbytes


def test_knobs_are_checked_where_they_are_set(engine):
    knobs = engine.knobs(GenerationConfig())
    for name, value in (("k", 17), ("k", "many"), ("k", 1.5), ("policy", "x"), ("temperature", 1.0), ("sl0ts", 1),
                        ("slots", 0), ("slots", True), ("link_gbps", float("nan")), ("prefetch", None)):  # fmt: skip
        with pytest.raises(UsageError):
            knobs.set(name, value)
    assert knobs.take() == []
    assert [knobs.set("k", value) for value in (1, 2, "auto")] == [1, 2, 3]
    assert [(update.value, update.version) for update, _ in knobs.take()] == [("auto", 3)]
