"""What the engine says about a run is true, complete and in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from recorded_runs import Recording, record
from tiny_models import PROMPTS
from transformers import AutoTokenizer

from engine import events
from engine.config import EngineConfig, GenerationConfig, LinkConfig
from engine.engine import Engine
from engine.kernels.native import Native, native
from engine.report import batch_figures
from specviz.metrics import reduce

SLOTS = 3
#: (name, link, prompts, what differs from k = 4 with prefetching by the draft)
RUNS: dict[str, tuple[str, list[str], dict]] = {
    "draft": ("disk", [PROMPTS[3]], {"k": 4}),
    "plain": ("disk", [PROMPTS[3]], {"k": 0}),
    "long": ("disk", [PROMPTS[0]], {"k": 16, "max_new_tokens": 50}),
    "auto": ("disk", [PROMPTS[0]], {"k": "auto", "max_new_tokens": 60}),
    "batch": ("disk", list(PROMPTS[:6]), {"k": 3}),
    "slow link": ("emulated:0.02:200", [PROMPTS[10]], {"k": 4}),
    "next layer": ("emulated:0.02", [PROMPTS[10]], {"k": 2, "knobs": {"prefetch": "next-layer"}}),
    "no prefetch": ("emulated:0.05", [PROMPTS[10]], {"k": 4, "knobs": {"prefetch": "none"}}),
    "one slot": ("disk", [PROMPTS[3]], {"k": 4, "knobs": {"slots": 1}}),
    "all slots": ("disk", [PROMPTS[3]], {"k": 4, "knobs": {"slots": 8}}),
    "sampled": ("disk", [PROMPTS[3]], {"k": 4, "temperature": 1.0, "top_p": 0.9, "seed": 5}),
}


@pytest.fixture(scope="module")
def engines(tiny_model) -> Iterator[dict[str, Engine]]:
    directory = str(tiny_model("qwen3_moe").directory)
    links = {link for link, _, _ in RUNS.values()}
    made = {link: Engine.load(EngineConfig(model=directory, link=LinkConfig.parse(link))) for link in links}
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module", params=RUNS, ids=lambda name: name.replace(" ", "-"))
def run(request, engines) -> tuple[Engine, Recording]:
    link, prompts, options = RUNS[request.param]
    engine = engines[link]
    knobs = engine.knobs(GenerationConfig(k=options["k"]))
    for name, value in {"slots": SLOTS, **options.get("knobs", {})}.items():
        knobs.set(name, value)
    settings = {name: value for name, value in options.items() if name != "knobs"}
    return engine, record(engine, prompts, knobs, **{"max_new_tokens": 24, **settings})


def decoded(events_of_run: list[events.CacheState]) -> list[events.CacheState]:
    """Without the prefill's, which is round 0."""
    return [state for state in events_of_run if state.round > 0]


def test_order(run):
    _, recording = run
    kinds = [event.kind for event in recording.events]
    assert kinds[0] == "run_start" and recording.events[0].t == 0
    assert kinds[-1] == "run_end" and kinds.count("run_start") == kinds.count("run_end") == 1
    assert [phase.phase for phase in recording.of(events.Phase)] == ["prefill", "decode"]
    assert kinds.index("round") > max(i for i, kind in enumerate(kinds) if kind == "phase")
    for event in recording.events:
        assert event.t <= recording.events[-1].t
        assert events.EVENTS[event.kind] is type(event)
    numbers = sorted({event.round for event in recording.of(events.Round)})
    assert numbers == list(range(1, len(numbers) + 1))
    for kind in (events.GovernorChoice, events.RooflinePoint):
        assert [event.round for event in recording.of(kind)] == numbers
    assert [state.round for state in recording.of(events.CacheState)] == [0, *numbers]


def test_rounds_count_their_tokens(run):
    _, recording = run
    for sequence, result in enumerate(recording.results):
        rounds = [event for event in recording.of(events.Round) if event.sequence == sequence]
        # The summary's rounds are those of the whole batch.
        assert result["rounds"] == len(recording.of(events.Round))
        for event in rounds:
            assert event.verified == min(event.accepted + 1, event.drafted) and event.drafted <= event.k
            assert len(event.rejected) == event.drafted - event.accepted
            assert [r.verified for r in event.rejected] == [True, *[False] * len(event.rejected)][: len(event.rejected)]
            last = "plain" if event.drafted == 0 else "bonus" if event.accepted == event.drafted else "corrected"
            states = [*["accepted"] * event.accepted, last]
            assert [token.state for token in event.tokens] == states[: len(event.tokens)]
            assert [token.position for token in event.tokens] == list(range(len(event.tokens)))
        assert all(len(event.tokens) == event.accepted + 1 for event in rounds[:-1])
        emitted = [token for event in rounds for token in event.tokens]
        assert [token.id for token in emitted] == result["token_ids"]
        assert "".join(token.text for token in emitted) == result["text"]
        tokenizer = AutoTokenizer.from_pretrained(recording.of(events.RunStart)[0].config["model"])
        assert result["text"] == tokenizer.decode(result["token_ids"], skip_special_tokens=True)


def test_tokens_carry_what_produced_them(run):
    engine, recording = run
    start = recording.of(events.RunStart)[0].model
    assert (start["moe_layers"], start["layers"], start["top_k"], start["experts"]) == (2, 3, 3, 8)
    for event in recording.of(events.Round):
        for token in event.tokens:
            assert [len(set(experts)) for experts in token.experts] == [start["top_k"]] * start["moe_layers"]
            assert 0 <= token.p_target <= 1 + 1e-6
            assert (token.p_draft is None) == (token.state in ("plain", "bonus", "corrected"))
            assert token.alternatives[0][1] >= token.alternatives[-1][1]


def test_times_are_ordered(run):
    _, recording = run
    before = recording.of(events.Phase)[1].t
    by_round: dict[int, list[events.Round]] = {}
    for event in recording.of(events.Round):
        by_round.setdefault(event.round, []).append(event)
    for parts in by_round.values():
        first = parts[0]
        assert before <= first.start <= first.draft_end <= first.verify_start <= first.verify_end <= first.t
        assert 0 <= first.stall_ns <= first.verify_end - first.verify_start
        for other in parts:
            assert (other.start, other.verify_end, other.stall_ns) == (first.start, first.verify_end, first.stall_ns)
        before = first.t


def test_compute_fills_each_pass(run):
    """A pass is attention and experts of each MoE layer, then the head, without a gap or an overlap."""
    _, recording = run
    for event in {event.round: event for event in recording.of(events.Round)}.values():
        slices = [s for s in recording.of(events.Compute) if s.round == event.round and s.lane == "verify"]
        assert [s.op for s in slices] == ["attention", "experts"] * 2 + ["head"]
        assert [s.layer for s in slices] == [0, 0, 1, 1, -1]
        assert all(one.end == two.start for one, two in zip(slices, slices[1:], strict=False))
        assert event.verify_start <= slices[0].start and slices[-1].end <= event.verify_end


def test_phases_add_up_to_the_decoding_time(run):
    """Draft, verification and stall, and what comes after them in a round, are the time of decoding."""
    _, recording = run
    rounds = list({event.round: event for event in recording.of(events.Round)}.values())
    inside = sum(event.t - event.start for event in rounds)
    decode = batch_figures(recording.results)["decode_s"] * 1e9
    # Between rounds: events about the cache and the governor. A busy machine may take the core away there.
    assert inside <= decode
    assert decode - inside <= 0.02 * decode + 2e6 * len(rounds)
    time = recording.results[0]["time"]
    draft = sum(event.draft_end - event.start for event in rounds)
    verify = sum(event.verify_end - event.verify_start for event in rounds)
    assert time["draft_s"] == pytest.approx(draft / 1e9, abs=1e-6)
    assert time["verify_s"] + time["stall_s"] == pytest.approx(verify / 1e9, abs=1e-6)
    stalls = sum(event.stall_ns for event in rounds)
    told = sum(stall.end - stall.start for stall in recording.of(events.Stall) if stall.round > 0)
    assert time["stall_s"] * 1e9 == pytest.approx(stalls) == pytest.approx(told)


def test_every_transfer_is_settled_once(run):
    _, recording = run
    transfers = {transfer.id: transfer for transfer in recording.of(events.Transfer)}
    assert len(transfers) == len(recording.of(events.Transfer))
    outcomes = Counter(settled.id for settled in recording.of(events.Settled))
    assert set(outcomes.values()) <= {1}
    assert set(transfers) <= set(outcomes)
    # What a run prefetched and never used is settled when it ends, so nothing is left over for the next one.
    assert set(outcomes) == set(transfers)
    for settled in recording.of(events.Settled):
        cause = transfers[settled.id].cause
        allowed = {"demand", "cancelled"} if cause == "demand" else {"used", "late", "wasted", "cancelled"}
        assert settled.outcome in allowed
        if settled.outcome != "cancelled":
            assert transfers[settled.id].bytes == 3 * 24 * 32 * 4
    for transfer in transfers.values():
        assert transfer.queued <= transfer.start <= transfer.end


def test_requests_add_up(run):
    engine, recording = run
    experts = recording.results[0]["experts"]
    states = decoded(recording.of(events.CacheState))
    for name in ("hits", "late", "misses"):
        assert experts[name] == sum(getattr(state, name) for state in states)
    assert experts["requests"] == experts["hits"] + experts["late"] + experts["misses"]
    fates = ("prefetch_used", "prefetch_late", "prefetch_wasted", "prefetch_cancelled")
    assert experts["prefetched"] == sum(experts[fate] for fate in fates)
    for state in states:
        # One pass a round: each expert that was used was requested once.
        assert state.hits + state.late + state.misses == sum(map(len, state.used))
        # Layers lend each other slots.
        assert sum(map(len, state.resident)) <= state.slots_per_layer * len(state.resident)
        tokens = [t for r in recording.of(events.Round) if r.round == state.round for t in r.tokens]
        for layer, used in enumerate(state.used):
            assert {expert for token in tokens for expert in token.experts[layer]} <= set(used)
    moved = [t for t in recording.of(events.Transfer) if t.round > 0]
    assert experts["bytes_loaded"] == sum(t.bytes for t in moved)
    misses = sum(t.cause == "demand" and t.bytes > 0 for t in moved)
    assert misses == experts["misses"]


def test_the_dashboard_computes_the_same_figures(run):
    """`specviz.metrics` from the events, the engine from its own counts: two ways to one number."""
    _, recording = run
    metrics = reduce(event.to_json() for event in recording.events).to_json()
    acceptance, experts, time = metrics["acceptance"], metrics["experts"], metrics["time"]
    result = recording.results[0]
    assert acceptance["rate"] == result["acceptance_rate"]
    assert acceptance["mean_length"] == result["mean_acceptance_length"]
    assert [position["rate"] for position in acceptance["by_position"]] == result["acceptance_by_position"]
    assert acceptance["emitted"] == sum(r["new_tokens"] for r in recording.results)
    for name in ("requests", "hits", "late", "misses"):
        assert experts[name] == result["experts"][name]
    for name in ("draft", "verify", "stall"):
        assert time[f"{name}_ns"] == pytest.approx(result["time"][f"{name}_s"] * 1e9, abs=10)
    assert metrics["overlap"]["transfer_ns"] == pytest.approx(result["time"]["transfer_s"] * 1e9, abs=10)
    assert metrics["overlap"]["overlapped_ns"] == pytest.approx(result["time"]["overlapped_s"] * 1e9, abs=10)
    assert metrics["lost"] == 0 and metrics["transfers"]["unsettled"] == 0


def test_memory_is_told_before_it_is_filled(engines, monkeypatch):
    """The KV cache allocates with its first write; RunStart says its size all the same."""
    engine, caches = engines["disk"], []
    new_cache = engine.loaded.runner.new_cache
    monkeypatch.setattr(engine.loaded.runner, "new_cache", lambda *size: caches.append(new_cache(*size)) or caches[-1])
    told = []
    [result] = engine.generate([PROMPTS[3]], GenerationConfig(max_new_tokens=5, k=2), emit=told.append)
    memory = next(event.memory for event in told if isinstance(event, events.RunStart))
    assert memory == result["memory"]
    assert memory["kv"] == caches[0].nbytes > 0
    assert memory["total"] == sum(memory[part] for part in ("shared", "draft", "cache", "kv"))


def test_the_machine_is_told_with_its_kernels(tiny_model, monkeypatch):
    """Which variant computes, or why torch does."""

    def told(**options) -> str:
        engine = Engine.load(EngineConfig(model=str(tiny_model("qwen3_moe").directory), **options))
        try:
            start = record(engine, ["Hello"], max_new_tokens=1).of(events.RunStart)[0]
        finally:
            engine.close()
        return start.machine["kernels"]

    assert told(kernels=()) == "torch (no kernels were asked for)"
    found = native()
    if isinstance(found, Native):
        assert told() == found.variant
        assert told(kernels=("draft", "linear")) == f"{found.variant} (linear, draft)"
    monkeypatch.setenv("SPECVIZ_KERNELS", "off")
    assert told() == "torch (switched off (SPECVIZ_KERNELS=off))"
