"""The hierarchical roofline of a run, against sums made here from the same events."""

from __future__ import annotations

import json

import pytest
from node import STATIC, javascript, needs_node

pytestmark = needs_node

MODEL = {"moe_layers": 2, "experts": 4, "top_k": 2, "hidden": 8, "vocab": 10, "expert_bytes": 400, "dtype": "float32"}
MACHINE = {"device": "cpu", "roofs": {"tflops": 0.001, "memory_gbps": 2.0, "read_bytes": 128}}
#: 1000 bytes of shared weights are read in a pass: the embedding of 8 × 10 × 4 bytes is not.
START = {
    "kind": "run_start", "model": MODEL, "machine": MACHINE, "link": {"gbps": 0.5, "emulated": True},
    "memory": {"shared": 1320, "draft": 800, "cache": 0, "kv": 0, "total": 0},
}  # fmt: skip


def one_round(number: int) -> list[dict]:
    """A draft of one token, then a pass of two rows: attention, experts (of which 30 ns waiting) and the head."""
    base = {"kind": "compute", "round": number, "layer": 0, "rows": 2, "lane": "verify"}
    return [
        {**base, "lane": "draft", "op": "token", "rows": 1, "start": 0, "end": 1000},
        {**base, "op": "attention", "start": 1000, "end": 1300},
        {**base, "op": "experts", "start": 1300, "end": 2300},
        {"kind": "stall", "round": number, "start": 1400, "end": 1900},
        {**base, "op": "attention", "layer": 1, "start": 2300, "end": 2600},
        {**base, "op": "experts", "layer": 1, "start": 2600, "end": 3600},
        {**base, "op": "head", "layer": -1, "start": 3600, "end": 4000},
        {"kind": "cache", "round": number, "hits": 3, "late": 1, "misses": 2},
        {"kind": "roofline", "round": number, "moved_bytes": 1200, "seconds": 5e-6},
    ]


def report(events: list[dict]) -> dict | None:
    script = """
    const { Phases } = await import(`file://${process.argv[2]}/phases.js`);
    const phases = new Phases();
    for (const event of JSON.parse(process.argv[3])) phases.add(event);
    console.log(JSON.stringify(phases.report()));
    """
    return json.loads(javascript(script, STATIC, json.dumps(events)))


def test_each_phase_by_hand():
    points = {point["phase"]: point for point in report([START, *one_round(0)])["roofline"]}
    # 4 bytes a weight, two operations a weight and row; half a byte of a draft weight for each of the target's.
    draft_flops, draft_bytes = 2 * (1000 + 2 * 2 * 400) / 4, 1000 + 2 * 2 * 400 * 800 / (2 * 4 * 400)
    expert_flops, expert_bytes = 2 * 2 * (2 * 2 * 400) / 4, 6 * 400
    shared_flops = 2 * 2 * 1000 / 4
    expected = {
        "draft": (draft_flops / draft_bytes, draft_flops / 1000),
        "shared weights": (shared_flops / 1000, shared_flops / (300 + 300 + 400)),
        "experts": (expert_flops / expert_bytes, expert_flops / (2000 - 500)),
        "experts, whole round": (expert_flops / 1200, expert_flops / 5000),
    }
    for phase, (intensity, gflops) in expected.items():
        assert points[phase]["intensity"] == pytest.approx(intensity), phase
        assert points[phase]["measured"] == pytest.approx(gflops / 1e3), phase
    # Roofs: 1 GFLOP/s of arithmetic, 2 GB/s of memory, 0.5 GB/s of link.
    assert points["experts"]["binds"] == "arithmetic" and points["experts"]["tflops"] == 0.001
    assert points["draft"]["binds"] == "arithmetic"
    assert points["experts, whole round"]["binds"] == "the link"
    assert points["experts, whole round"]["tflops"] == pytest.approx(0.5e9 * expert_flops / 1200 / 1e12)


def test_only_the_last_twenty_whole_rounds_count():
    slow = [dict(event) for event in one_round(0)]
    slow[0] = {**slow[0], "end": 10**9}
    fast = [event for number in range(1, 21) for event in one_round(number)]
    open_round = [event for event in one_round(21) if event["kind"] == "compute"]
    assert report([START, *slow, *fast, *open_round]) == report([START, *one_round(1)])


def test_without_sizes_or_roofs_nothing_is_invented():
    bare = {**START, "model": {key: value for key, value in MODEL.items() if key != "hidden"}}
    assert report([bare, *one_round(0)]) is None
    assert report([START]) is None
    old = report([{**START, "machine": {"device": "cpu"}}, *one_round(0)])  # recorded before roofs were measured
    assert [roof["roof"] for roof in old["roofs"]] == ["the link (emulated)"]
    assert next(p for p in old["roofline"] if p["phase"] == "draft")["tflops"] is None  # JSON has no infinity
