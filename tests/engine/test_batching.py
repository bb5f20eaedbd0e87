"""Continuous batching: ragged prompts that join, end and leave at different times, and none of it shows in a text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from recorded_runs import record
from test_identity import EMBEDDED
from tiny_models import PROMPTS, TinyModel, greedy

from engine import events
from engine.config import EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.errors import UsageError
from engine.report import batch_figures
from engine.requests import Request

NEW_TOKENS = 12
#: 32 prompts of 1 to 40 tokens, of which each wants another number of new ones.
MANY = (*PROMPTS, *(f"{prompt} and" for prompt in PROMPTS[:12]))
LIMITS = [1 + (5 * number) % NEW_TOKENS for number in range(len(MANY))]
REQUESTS = [Request(prompt, limit) for prompt, limit in zip(MANY, LIMITS, strict=True)]
LIMIT = {"max_new_tokens": NEW_TOKENS}
DRAFTS = ("self-int4", "sparse", "ngram")


@pytest.fixture(scope="module")
def saved(tiny_model) -> Callable[[str], TinyModel]:
    return lambda name: EMBEDDED if name == "embedded" else tiny_model(name)


@pytest.fixture(scope="module")
def expected(saved) -> Callable[[str], list[list[int]]]:
    """transformers' own text for each of MANY on its own, cut where its request ends."""
    known: dict[str, list[list[int]]] = {}

    def lookup(name: str) -> list[list[int]]:
        if name not in known:
            model = saved(name)
            whole = greedy(model.reference(), model.directory, MANY, NEW_TOKENS)
            known[name] = [ids[:limit] for ids, limit in zip(whole, LIMITS, strict=True)]
        return known[name]

    return lookup


@pytest.fixture(scope="module")
def engine_of(saved) -> Iterator[Callable[[str, str], Engine]]:
    engines: dict[tuple[str, str], Engine] = {}

    def lookup(name: str, draft: str) -> Engine:
        if (name, draft) not in engines:
            engines[name, draft] = Engine.load(EngineConfig(model=str(saved(name).directory), draft=draft))
        return engines[name, draft]

    yield lookup
    for engine in engines.values():
        engine.close()


def options(batch: int, k: int, **others) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW_TOKENS, batch=batch, k=k, **others)


@pytest.mark.parametrize(("batch", "k"), [(32, 0), (32, 4), (7, 3), (1, 2)])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ("embedded", "mixtral"))
def test_every_text_is_that_of_transformers_alone(name: str, draft: str, batch: int, k: int, expected, engine_of):
    if k == 0 and draft != DRAFTS[0]:
        pytest.skip("nobody drafts")
    results = engine_of(name, draft).generate(REQUESTS, options(batch, k))
    assert [result["token_ids"] for result in results] == expected(name)


def test_a_model_of_its_own_drafts_for_those_that_join(tiny_model, dense_model, expected):
    """Its KV cache is reused with the target's: what a sequence left there is nobody's past."""
    model = tiny_model("mixtral")
    # The target itself would be the best draft; a dense model is all that can be loaded, so it is mostly wrong.
    config = EngineConfig(model=str(model.directory), draft=f"model:{dense_model.directory}")
    engine = Engine.load(config)
    try:
        results = engine.generate(REQUESTS, options(5, 2))
    finally:
        engine.close()
    assert [result["token_ids"] for result in results] == expected("mixtral")


def test_slots_are_reused_as_soon_as_they_are_free(engine_of):
    engine = engine_of("mixtral", "self-int4")
    recording = record(engine, REQUESTS, **LIMIT, batch=4, k=2)
    joins = recording.of(events.Join)
    assert [join.sequence for join in joins] == list(range(len(MANY)))
    last = {event.sequence: event.round for event in recording.of(events.Round)}
    assert {event.sequence for event in recording.of(events.Round) if event.finished} == set(range(len(MANY)))
    for join in joins:
        # Rounds of others go on in between, but never more than four at a time, each with a slot of its own.
        present = [j for j in joins if j.round <= join.round < last[j.sequence]]
        assert len({j.slot for j in present}) == len(present) <= 4
        assert join.start <= join.t
    for round_number in {event.round for event in recording.of(events.Round)} - {max(last.values())}:
        # Nobody waits while there is room.
        active = [event for event in recording.of(events.Round) if event.round == round_number]
        waiting = [join for join in joins if join.round >= round_number]
        assert len(active) == 4 or not waiting
    started = recording.of(events.RunStart)[0]
    alone = record(engine, REQUESTS[:4], **LIMIT, batch=4, k=2).of(events.RunStart)[0]
    assert started.memory["kv"] <= 1.5 * alone.memory["kv"], "the KV cache is for those in the batch"


def test_times_are_each_sequence_s_own(engine_of):
    results = engine_of("mixtral", "self-int4").generate(REQUESTS, options(4, 0))
    first, last = results[0], results[-1]
    assert first["ttft_s"] < last["ttft_s"] <= last["finished_s"]
    for result in results:
        assert result["decode_tok_s"] == pytest.approx(result["new_tokens"] / result["decode_s"])
        assert 0 < result["decode_s"] <= result["finished_s"]
    batch = batch_figures(results)
    assert (batch["sequences"], batch["new_tokens"]) == (len(MANY), sum(len(r["token_ids"]) for r in results))
    assert max(r["decode_s"] for r in results) <= batch["decode_s"] <= sum(r["decode_s"] for r in results)


@pytest.mark.parametrize(("draft", "k"), [("self-int4", 3), ("ngram", 4), ("self-int4", 0)])
def test_what_is_sampled_does_not_depend_on_who_shares_the_batch(draft: str, k: int, engine_of):
    engine = engine_of("mixtral", draft)

    def sampled(batch: int, requests: list[Request]) -> list[list[int]]:
        results = engine.generate(requests, options(batch, k, temperature=0.9, top_p=0.95, seed=11))
        return [result["token_ids"] for result in results]

    together = sampled(8, REQUESTS[:8])
    assert sampled(3, REQUESTS[:8]) == sampled(1, REQUESTS[:8]) == together
    assert sampled(2, REQUESTS[:1]) == together[:1]
    same = engine.generate([PROMPTS[0]] * 2, options(2, k, temperature=1.5, seed=11))
    assert same[0]["token_ids"] != same[1]["token_ids"], "equal prompts are sampled independently"


def test_a_stop_leaves_the_waiting_ones_unanswered(engine_of):
    """What was emitted stays; who never joined has no text and no times."""
    engine = engine_of("mixtral", "self-int4")
    stop = threading.Event()
    hear = lambda event: stop.set() if isinstance(event, events.Round) else None  # noqa: E731
    recording = record(engine, REQUESTS, None, stop, hear, **LIMIT, batch=3, k=2)
    assert {result["finish_reason"] for result in recording.results} >= {"cancelled"}
    never = recording.results[-1]
    assert (never["token_ids"], never["ttft_s"], never["decode_tok_s"]) == ([], None, None)
    assert engine.generate(REQUESTS[:2], options(2, 2))[0]["finish_reason"] in ("length", "eos")


def test_no_prompt_is_refused(engine_of):
    with pytest.raises(UsageError, match="no prompt"):
        engine_of("mixtral", "self-int4").generate([], options(4, 0))
