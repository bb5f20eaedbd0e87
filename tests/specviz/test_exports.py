"""What is exported agrees with itself: the trace with its format and with the summary, the CSV with the JSON."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chrome_format import check_trace
from fake_engine import FakeLoader
from hostile import TEXTS, hostile_run
from starlette.applications import Starlette
from starlette.testclient import TestClient

from engine.serve.session import Session
from engine.serve.wire import decode
from specviz.perfetto import LANES, chrome_trace
from specviz.server import MAKERS, create_routes
from specviz.spreadsheet import FORMULA_STARTS, summary_csv
from specviz.trace import load_events, parse_events, summary

ROOT = Path(__file__).resolve().parents[2]
STREAMS = [*sorted((ROOT / "tests/golden").glob("*.ndjson")), *sorted((ROOT / "assets/recordings").glob("*.gz"))]


@pytest.fixture(params=STREAMS, ids=lambda path: path.stem)
def events(request) -> list[dict[str, Any]]:
    return load_events(request.param)


def test_the_trace_keeps_to_the_format(events):
    trace = json.loads(json.dumps(chrome_trace(events), allow_nan=False))
    check_trace(trace)
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert set(LANES) <= named
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert {"draft length", "emitted", "resident"} <= counters


BREAK: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "negative": lambda trace: next(e for e in trace if e["ph"] == "X").update(dur=-1),
    "no time": lambda trace: next(e for e in trace if e["ph"] == "X").pop("ts"),
    "arrow without end": lambda trace: trace.remove(next(e for e in trace if e["ph"] == "f")),
    "arrow into nothing": lambda trace: next(e for e in trace if e["ph"] == "f").update(ts=1e12),
    "counter of text": lambda trace: next(e for e in trace if e["ph"] == "C").update(args={"k": "3"}),
    "unknown": lambda trace: trace[0].update(ph="?"),
    "nameless thread": lambda trace: next(e for e in trace if e["ph"] == "M").update(args={}),
}


@pytest.mark.parametrize("name", BREAK)
def test_the_check_of_the_format_can_fail(name):
    trace = copy.deepcopy(chrome_trace(load_events(ROOT / "tests/golden/draft4.ndjson")))
    BREAK[name](trace["traceEvents"])
    with pytest.raises((AssertionError, KeyError)):
        check_trace(trace)


def test_the_trace_adds_up_to_the_summary(events):
    told = summary(events)["metrics"]
    trace = chrome_trace(events)["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    slices = [e for e in trace if e["ph"] == "X"]
    rounds = [e["args"] for e in slices if lanes[e["tid"]] == "rounds"]
    acceptance = told["acceptance"]
    for name in ("drafted", "verified", "accepted", "emitted"):
        assert sum(args[name] for args in rounds) == acceptance[name], name
    assert len(rounds) == told["time"]["passes"]
    assert sum(args["sequences"] for args in rounds) == acceptance["rounds"]
    last = [e for e in trace if e["name"] == "emitted"][-1]
    assert last["args"]["tokens"] == acceptance["emitted"]
    # The other figures are of the decoding alone.
    (begin,) = [e["ts"] for e in trace if e["ph"] == "i" and e["name"] == "decode"]
    stalled = sum(e["dur"] for e in slices if lanes[e["tid"]] == "stall" and e["ts"] >= begin)
    assert stalled * 1000 == pytest.approx(told["time"]["stalled_ns"], abs=1)
    after = events[next(n for n, e in enumerate(events) if e["kind"] == "phase" and e["phase"] == "decode") :]
    ids = {e["id"] for e in after if e["kind"] == "transfer"}
    transfers = [e for e in slices if lanes[e["tid"]].startswith("link") and e["args"]["id"] in ids]
    for cause, sums in told["transfers"]["by_cause"].items():
        moved = [e for e in transfers if lanes[e["tid"]].startswith(f"link {cause}")]
        assert sum(e["args"]["bytes"] for e in moved) == sums["bytes"]
        link_us = sum(e["dur"] - e["args"]["paused_us"] for e in moved)
        assert link_us * 1000 == pytest.approx(sums["ns"], abs=len(moved) + 1)
    outcomes = Counter(e["args"]["outcome"] for e in transfers)
    for outcome, sums in told["transfers"]["by_outcome"].items():
        # One that was cancelled before its first byte has no slice.
        assert outcomes[outcome] <= sums["count"] and (outcome == "cancelled" or outcomes[outcome] == sums["count"])


def test_the_spreadsheet_says_what_the_json_says(events):
    told = summary(events)
    rows = list(csv.reader(io.StringIO(summary_csv(told))))
    assert rows[0] == ["name", "value"]
    values = dict(rows[1:])
    assert len(values) == len(rows) - 1 > 50
    assert values["status"] == told["status"] and values["run.model.name"] == told["run"]["model"]["name"]
    assert float(values["metrics.acceptance.rate"] or 0) == (told["metrics"]["acceptance"]["rate"] or 0)
    assert (
        int(values["metrics.transfers.by_cause.demand.bytes"])
        == (told["metrics"]["transfers"]["by_cause"]["demand"]["bytes"])
    )


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", 'a\nb,"c"', "\ud83d", "${x}`", "</script>"])
def test_a_spreadsheet_takes_no_text_for_a_formula(text):
    rows = list(csv.reader(io.StringIO(summary_csv({"results": [{"text": text, "n": -3}]}))))
    (name, cell), number = rows[1], rows[2]
    assert name == "results.0.text" and number == ["results.0.n", "-3"]
    assert cell.lstrip("'") == text.encode("utf-8", "replace").decode() and not cell.startswith(
        ("=", "+", "-", "@", "\t")
    )
    summary_csv({"a": text}).encode()


def test_a_packed_recording_is_the_same(tmp_path):
    plain = ROOT / "tests/golden/hand.ndjson"
    packed = tmp_path / "a.ndjson.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_events(packed) == load_events(plain)


def served(text: str) -> dict[str, bytes]:
    """All exports of a run, as the server gives them."""
    session = Session(FakeLoader())
    try:
        hub = session.registry.create()
        for line in text.splitlines():
            hub.publish(decode(json.loads(line)))
        with TestClient(Starlette(routes=create_routes(session))) as client:
            answers = {name: client.get(f"/specviz/export/{hub.id}/{hub.token}/{name}") for name in MAKERS}
    finally:
        session.close()
    for answer in answers.values():
        # No browser takes it for a page, whatever a model wrote.
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff" and "html" not in answer.headers["content-type"]
    return {name: answer.content for name, answer in answers.items()}


def test_every_export_gives_hostile_text_back_as_it_was():
    run = hostile_run()
    told = [json.loads(line) for line in run.splitlines()]
    start = next(event for event in told if event["kind"] == "run_start")
    files = served(run)
    lines = [json.loads(line) for line in files["events.ndjson"].splitlines()]
    for before, after in zip(told, lines, strict=True):
        assert {**after, **before} == after, before["kind"]  # and what it was too old to tell
    assert load_text(files["events.ndjson"]) == lines
    check_trace(trace := json.loads(files["trace.json"]))
    assert trace["otherData"]["model"]["name"] == start["model"]["name"].encode("utf-8", "replace").decode()
    summary = json.loads(files["summary.json"])
    assert [result["text"] for result in summary["results"]] == list(TEXTS)
    rows = dict(csv.reader(io.StringIO(files["summary.csv"].decode(), newline="")))
    for number, text in enumerate(TEXTS):
        cell = rows[f"results.{number}.text"]
        quoted = cell.startswith("'") and text.startswith(FORMULA_STARTS)
        assert cell[quoted:] == text.encode("utf-8", "replace").decode(), text


def load_text(data: bytes) -> list[dict[str, Any]]:
    return parse_events(data.decode().splitlines())
