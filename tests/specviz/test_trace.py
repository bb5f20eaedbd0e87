from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import UsageError
from specviz.perfetto import LANES, chrome_trace
from specviz.trace import load_events, lost_events, parse_events, save_events, summary

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
STREAMS = sorted(GOLDEN.glob("*.ndjson"))


@pytest.fixture(params=STREAMS, ids=lambda path: path.stem)
def lines(request) -> list[str]:
    return request.param.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", ["run.ndjson", "run.ndjson.gz"])
def test_what_was_saved_is_loaded(tmp_path, lines, name):
    path = tmp_path / "new" / name
    save_events(path, lines)
    assert load_events(path) == [json.loads(line) for line in lines]
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "run.ndjson"
    save_events(path, ["{}"])

    def breaks():
        yield "{}"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_events(path, breaks())
    assert path.read_text() == "{}\n" and len(list(tmp_path.iterdir())) == 1


def change(line: str, **values) -> str:
    return json.dumps({**json.loads(line), **values})


def test_broken_recordings_are_refused_with_the_line(tmp_path):
    good = (GOLDEN / "hand.ndjson").read_text(encoding="utf-8").splitlines()
    cases = [
        ([*good[:3], good[3][:40]], "line 4 is not JSON: is the file cut off"),
        ([change(good[0], schema=99), *good[1:]], "line 1: recorded with schema version 99, this program reads 1"),
        ([good[0], change(good[1], kind="dance")], "line 2: unknown event kind 'dance'"),
        ([good[0], "[]"], "line 2: unknown event kind None"),
        ([good[0], good[2], good[1]], "line 3: sequence numbers must rise"),
        ([good[0], change(good[1], seq="2")], "line 2: sequence numbers must rise"),
        ([good[0], '{"seq":2,"kind":"phase","t":0}'], "line 2: phase lacks phase"),
        (good[1:], "holds no run_start"),
        ([], "holds no run_start"),
    ]
    for lines, message in cases:
        with pytest.raises(UsageError, match=message):
            parse_events(lines)
    with pytest.raises(UsageError, match="cannot read"):
        load_events(tmp_path / "missing.ndjson")
    (tmp_path / "cut.ndjson.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(UsageError, match="cannot read"):
        load_events(tmp_path / "cut.ndjson.gz")


def test_slices_keep_their_times_and_nest_in_their_lane(lines):
    events = parse_events(lines)
    trace = chrome_trace(events)["traceEvents"]
    json.dumps(trace, allow_nan=False)
    slices = [event for event in trace if event["ph"] == "X"]
    moved = [event for event in events if event["kind"] == "transfer" and event["end"] > event["start"]]
    computed = [event for event in events if event["kind"] == "compute"]
    link = [event for event in slices if event["tid"] >= 600]
    engine = [event for event in slices if 200 <= event["tid"] < 500 and not event["name"].startswith("prefetched")]
    for told, drawn in ((moved, link), (computed, engine)):
        times = sorted((event["start"], event["end"]) for event in told)
        assert times == sorted((round(s["ts"] * 1000), round((s["ts"] + s["dur"]) * 1000)) for s in drawn)
    for row in {event["tid"] for event in slices}:
        ends: list[float] = []
        for event in sorted((s for s in slices if s["tid"] == row), key=lambda s: (s["ts"], -s["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6, "slices overlap without nesting"
            ends.append(event["ts"] + event["dur"])
    named = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert set(LANES) <= named and {event["tid"] for event in slices} <= {e["tid"] for e in trace if e["ph"] == "M"}


def test_arrows_go_from_used_prefetches_to_a_later_use_of_the_same_layer(lines):
    events = parse_events(lines)
    trace = chrome_trace(events)["traceEvents"]
    transfers = {event["id"]: event for event in events if event["kind"] == "transfer"}
    used = {
        event["id"]
        for event in events
        if event["kind"] == "settled" and event["outcome"] in ("used", "late")
        and transfers[event["id"]]["cause"] == "prefetch"
    }  # fmt: skip
    begins = {event["id"]: event for event in trace if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace if event["ph"] == "f"}
    assert begins.keys() == ends.keys() == used
    for id, begin in begins.items():
        transfer = transfers[id]
        assert begin["tid"] >= 700 and transfer["start"] <= begin["ts"] * 1000 < transfer["end"]
        assert ends[id]["ts"] >= begin["ts"]
        outer, inner = [
            s for s in trace
            if s["ph"] == "X" and s["tid"] == 400 and s["ts"] <= ends[id]["ts"] < s["ts"] + s["dur"]
        ]  # fmt: skip
        assert outer["name"] == f"experts L{transfer['layer']}"
        # All that arrived late as well had come by then.
        assert inner["name"] == f"prefetched L{transfer['layer']}" and inner["ts"] * 1000 >= transfer["end"] - 1


def test_counters_return_to_zero_and_knobs_are_marked(lines):
    events = parse_events(lines)
    trace = chrome_trace(events)["traceEvents"]
    flying = [event["args"]["bytes"] for event in trace if event["ph"] == "C" and event["name"] == "in flight"]
    assert not flying or (flying[-1] == 0 and min(flying) >= 0 and max(flying) > 0)
    resident = [event["args"]["experts"] for event in trace if event["name"] == "resident"]
    assert resident == [sum(map(len, event["resident"])) for event in events if event["kind"] == "cache"]
    marks = sum(event["kind"] in ("knob", "phase", "draft_alarm") for event in events)
    assert sum(event["ph"] == "i" for event in trace) == marks > 0


def test_summary_states_the_end_and_what_is_missing(lines):
    events = parse_events(lines)
    told = summary(events)
    assert told["status"] == events[-1]["status"] and told["results"] == events[-1]["summary"]
    assert told["run"]["model"] == next(e for e in events if e["kind"] == "run_start")["model"]
    assert told["lost_events"] == 0 == lost_events(events)
    without = [event for event in events if event["kind"] != "compute"]
    assert summary(without)["lost_events"] == len(events) - len(without)


def test_what_a_recording_is_too_old_to_tell_is_read_as_its_default(tmp_path):
    path = tmp_path / "old.ndjson"
    path.write_text((GOLDEN / "hand.ndjson").read_text(encoding="utf-8").replace(',"prefetch":false', ""))
    assert '"prefetch":false' not in path.read_text()
    assert load_events(path) == [json.loads(line) for line in (GOLDEN / "hand.ndjson").open(encoding="utf-8")]
