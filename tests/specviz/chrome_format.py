"""The rules of the Chrome trace event format that Perfetto's importer goes by, for the kinds of event that we write.

From "Trace Event Format" (the Chrome developers' document) and Perfetto's page on external formats.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

NEEDED = {
    "X": ("name", "pid", "tid", "ts", "dur"),
    "M": ("name", "pid", "args"),
    "C": ("name", "pid", "ts", "args"),
    "i": ("name", "pid", "tid", "ts", "s"),
    "s": ("name", "cat", "id", "pid", "tid", "ts"),
    "f": ("name", "cat", "id", "pid", "tid", "ts", "bp"),
}
METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def check_trace(trace: dict[str, Any]) -> None:
    """Raises AssertionError at the first rule that is broken."""
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] in ("ms", "ns")
    slices, flows = defaultdict(list), defaultdict(list)
    for event in trace["traceEvents"]:
        phase = event.get("ph")
        assert phase in NEEDED, f"unknown phase {phase!r}"
        assert all(name in event for name in NEEDED[phase]), f"{event} lacks one of {NEEDED[phase]}"
        for name in ("ts", "dur"):
            number = event.get(name, 0)
            assert isinstance(number, (int, float)) and number >= 0, f"{name} of {event}"
        assert all(isinstance(event.get(name, 0), int) for name in ("pid", "tid")), event
        if phase == "M":
            assert METADATA[event["name"]] in event["args"]
        elif phase == "C":
            assert event["args"] and all(isinstance(value, (int, float)) for value in event["args"].values())
        elif phase == "i":
            assert event["s"] in ("g", "p", "t")
        elif phase == "X":
            slices[event["pid"], event["tid"]].append(event)
        elif phase in "sf":
            flows[event["cat"], event["id"]].append(event)
    for parts in flows.values():
        _check_flow(parts, slices)


def _check_flow(parts: list[dict[str, Any]], slices: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    """An arrow has a start and a later finish, and each lies inside a slice of its thread, to which it binds."""
    assert sorted(part["ph"] for part in parts) == ["f", "s"], parts
    start, finish = sorted(parts, key=lambda part: part["ph"] == "f")
    assert start["ts"] <= finish["ts"] and finish["bp"] == "e"
    for part in parts:
        own = slices[part["pid"], part["tid"]]
        assert any(s["ts"] <= part["ts"] <= s["ts"] + s["dur"] for s in own), f"{part} lies in no slice"
