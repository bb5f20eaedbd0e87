"""Metrics against numbers worked out on paper, brute force on a grid of time, and the identities of the design."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from engine.events import TRANSFER_OUTCOMES
from engine.overlap import BUSY_LIMIT, Overlap
from specviz.metrics import Metrics, reduce

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.ndjson"))


def load(name: str) -> list[dict]:
    return [json.loads(line) for line in (GOLDEN / f"{name}.ndjson").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(params=NAMES)
def events(request) -> list[dict]:
    return load(request.param)


def of(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["kind"] == kind]


def test_hand_written_run():
    figures = reduce(load("hand")).to_json()
    acceptance = figures["acceptance"]
    assert (acceptance["emitted"], acceptance["accepted"], acceptance["rounds"], acceptance["cut"]) == (3, 1, 2, 0)
    assert acceptance["rate"] == 1 / 2
    assert acceptance["mean_length"] == 1 + 1 / 1  # the plain round does not count
    assert [row["rate"] for row in acceptance["by_position"]] == [1, 0]
    assert acceptance["tokens_per_round"] == [0, 1, 1]
    # Prefetch 1 ran wholly under the draft; demand 2 for 500 of 2000 ns, the rest was a stall; prefetch 3
    # was late by 500 of 1500 ns; prefetch 5 ran 200 ns under round 0 and 600 ns of its 1200 under round 1.
    assert figures["overlap"]["overlapped_ns"] == 1000 + 500 + 1000 + 800
    assert figures["overlap"]["transfer_ns"] == 1000 + 2000 + 1500 + 1200
    assert figures["overlap"]["overlap"] == 3300 / 5700
    time = figures["time"]
    assert (time["draft_ns"], time["verify_ns"], time["stall_ns"], time["other_ns"]) == (2000, 4000, 2000, 600)
    assert time["mean_rate"] == 3 / 8600e-9
    experts = figures["experts"]
    assert (experts["hits"], experts["late"], experts["misses"], experts["requests"]) == (5, 1, 1, 7)
    assert experts["hit_rate"] == 6 / 7
    assert experts["heat"][0] == pytest.approx([0.1 * 0.9, 0.1 * 0.9 + 0.1, 0])
    assert {name: row["count"] for name, row in figures["transfers"]["by_outcome"].items()} == dict.fromkeys(
        TRANSFER_OUTCOMES, 1
    )
    window = figures["roofline"]["window"]
    assert window["intensity"] == 2 / 200
    assert window["io_roof"] == pytest.approx(1e6)
    assert window["bound"] == "compute"
    assert figures["knobs"] == [{"round": 1, "t": 8200, "name": "k", "old": 2, "new": 0, "version": 1}]


def test_acceptance_by_independent_count(events):
    rounds = of(events, "round")
    acceptance = reduce(events).to_json()["acceptance"]
    for position, row in enumerate(acceptance["by_position"]):
        assert row["verified"] == sum(r["verified"] > position for r in rounds)
        assert row["accepted"] == sum(r["accepted"] > position for r in rounds)
    lengths = Counter(len(r["tokens"]) for r in rounds)
    assert acceptance["tokens_per_round"] == [lengths[n] for n in range(max(lengths) + 1)]
    drafted = [r for r in rounds if r["drafted"]]
    if drafted:
        assert acceptance["mean_length"] == pytest.approx(sum(1 + r["accepted"] for r in drafted) / len(drafted))
    else:
        assert acceptance["mean_length"] is None
        assert acceptance["rate"] is None
    recent = rounds[-20:]
    if verified := sum(r["verified"] for r in recent):
        assert acceptance["window"]["rate"] == sum(r["accepted"] for r in recent) / verified


def test_identities(events):
    figures = reduce(events).to_json()
    acceptance, experts, time = figures["acceptance"], figures["experts"], figures["time"]
    last_cut = max(len(r["tokens"]) < r["accepted"] + 1 for r in of(events, "round"))
    assert acceptance["emitted"] == acceptance["accepted"] + acceptance["rounds"] - acceptance["cut"]
    assert (acceptance["cut"] > 0) == last_cut
    assert sum(acceptance["states"].values()) == acceptance["emitted"]
    assert experts["requests"] == experts["hits"] + experts["late"] + experts["misses"]
    assert experts["requests"] == sum(len(row) for event in of(events, "cache") for row in event["used"])
    assert sum(time[key] for key in ("draft_ns", "verify_ns", "stall_ns", "other_ns")) == time["decode_ns"]
    assert time["other_ns"] >= 0
    outcomes = figures["transfers"]["by_outcome"]
    decode = next(n for n, e in enumerate(events) if e["kind"] == "phase" and e["phase"] == "decode")
    assert sum(row["count"] for row in outcomes.values()) == len(of(events[decode:], "transfer"))
    assert sum(row["bytes"] for row in outcomes.values()) == sum(e["bytes"] for e in of(events[decode:], "transfer"))
    assert figures["transfers"]["unsettled"] == 0
    assert figures["lost"] == 0


def test_end_of_text_inside_a_draft_is_cut():
    figures = reduce(load("eos")).to_json()
    assert figures["acceptance"]["cut"] == 3  # four accepted and a bonus token, the text ended with the second
    assert figures["run"]["status"] == "finished"


def test_a_batch_shares_its_time_and_adds_its_tokens():
    events = load("batch2")
    rounds = of(events, "round")
    figures = reduce(events).to_json()
    assert figures["time"]["passes"] == len(rounds) / 2
    assert figures["time"]["draft_ns"] == sum(r["draft_end"] - r["start"] for r in rounds) / 2
    tokens = sum(len(r["tokens"]) for r in rounds)
    assert figures["time"]["mean_rate"] == pytest.approx(tokens / (figures["time"]["decode_ns"] / 1e9))
    assert len(figures["time"]["series"]) == len(rounds) / 2


def test_a_stopped_run_keeps_what_it_had():
    figures = reduce(load("stopped")).to_json()
    assert figures["run"]["status"] == "stopped"
    assert figures["acceptance"]["emitted"] > 0


def test_overlap_equals_a_count_on_a_grid():
    rng = random.Random(3)
    for _ in range(50):
        spans = {
            name: [(start, start + rng.randrange(1, 30)) for start in (rng.randrange(200) for _ in range(count))]
            for name, count in (("compute", 6), ("stall", 3), ("transfer", 5))
        }
        overlap = Overlap()
        for interval in spans["compute"]:
            overlap.compute(*interval)
        for interval in spans["stall"]:
            overlap.stall(*interval)
        moving = []
        for start, end in spans["transfer"]:
            cuts = sorted(rng.randrange(start, end + 1) for _ in range(4))
            pauses = [[cuts[0], cuts[1]], [cuts[2], cuts[3]]]
            overlap.transfer(start, end, pauses)
            moving += [t for t in range(start, end) if not any(a <= t < b for a, b in pauses)]
        overlap.fold()
        inside = {name: {t for a, b in spans[name] for t in range(a, b)} for name in ("compute", "stall")}
        busy = inside["compute"] - inside["stall"]
        assert overlap.overlapped_ns == sum(t in busy for t in moving)
        assert overlap.transfer_ns == len(moving)


def test_overlap_remembers_a_bounded_past():
    overlap = Overlap()
    for i in range(BUSY_LIMIT * 3):
        overlap.compute(10 * i, 10 * i + 5)
        if i % 100 == 0:
            overlap.fold(10 * i)
    overlap.fold()
    end = 10 * BUSY_LIMIT * 3
    overlap.transfer(end - 100, end, [])
    overlap.fold()
    assert (overlap.overlapped_ns, overlap.transfer_ns) == (50, 100)


def test_windowed_rate_over_one_second():
    metrics = Metrics()
    for i in range(30):  # 10 rounds a second of 2 tokens, then 10 a second of 1
        start = i * 100_000_000
        tokens = [{"state": "plain"}] * (2 if i < 20 else 1)
        metrics.add(
            {"kind": "round", "t": start + 100_000_000, "round": i, "drafted": 0, "verified": 0, "accepted": 0,
             "tokens": tokens, "rejected": [], "start": start, "draft_end": start, "verify_start": start,
             "verify_end": start + 90_000_000, "stall_ns": 0}
        )  # fmt: skip
    series = metrics.to_json()["time"]["series"]
    assert series[9]["rate"] == pytest.approx(20)
    assert series[24]["rate"] == pytest.approx(15)
    assert series[29]["rate"] == pytest.approx(10)
    assert series[29]["mean"] == pytest.approx(50 / 3)


def test_repeated_and_lost_events():
    events = load("draft4")
    metrics = Metrics()
    for event in events[:50] + events[20:50] + events[60:]:
        metrics.add(event)
    assert metrics.to_json()["lost"] == 10
    whole = reduce(events).to_json()
    again = reduce([event for event in events for _ in range(2)]).to_json()
    assert again == whole


def test_unknown_kinds_are_ignored():
    assert Metrics().add({"kind": "__class__", "t": 5, "seq": 1}).to_json()["t"] == 5


def test_memory_is_bounded():
    metrics, events = Metrics(), [e for e in load("draft4") if e["kind"] not in ("run_end", "run_start")]
    for lap in range(200):
        for event in events:
            moved = {**event, "seq": None}
            for key in {"t", "start", "end", "draft_end", "verify_start", "verify_end"} & moved.keys():
                moved[key] += lap * 1_000_000_000
            if "round" in moved:
                moved["round"] += lap * 100
            metrics.add(moved)
    assert len(json.dumps(metrics.to_json())) < 1_000_000
    assert metrics.to_json()["acceptance"]["emitted"] == 200 * 32


@pytest.mark.parametrize("name", NAMES)
def test_golden_metrics(name):
    expected = json.loads((GOLDEN / f"{name}.metrics.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(reduce(load(name)).to_json())) == expected
