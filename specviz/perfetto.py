"""A run's events as the JSON trace that Perfetto and chrome://tracing open.

Times there are microseconds. Slices of one lane must nest, yet transfers of one link overlap each
other, so each link lane gets as many rows as it needs.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]

LANES = ("rounds", "draft", "verify", "experts", "stall", "link demand", "link prefetch")
PID = 1
#: Rows of one lane lie this far apart in thread numbers, which is also how many there can be.
LANE_STRIDE = 100
#: Outcomes after which an expert that was fetched ahead was really used.
CONSUMED = ("used", "late")


def chrome_trace(events: list[Record]) -> dict[str, Any]:
    """{"traceEvents": …, "displayTimeUnit": "ms", "otherData": …}: slices, flows prefetch → use, counters."""
    start = next((event for event in events if event["kind"] == "run_start"), {})
    rows = _Rows()
    slices = [*_round_slices(events), *_engine_slices(events), *_transfer_slices(events, rows)]
    return {
        "traceEvents": [*rows.names(), *slices, *_flows(events, rows), *_counters(events), *_marks(events)],
        "displayTimeUnit": "ms",
        "otherData": {name: start.get(name) for name in ("model", "machine", "link", "config", "memory")},
    }


def trace_json(events: list[Record]) -> str:
    """`chrome_trace` as JSON. Perfetto does not read escapes, so what is no ASCII is written as it is.

    Half of an emoji has no place in a file; it becomes a question mark.
    """
    return json.dumps(chrome_trace(events), ensure_ascii=False).encode("utf-8", "replace").decode()


class _Rows:
    """Thread numbers: one for each lane, more where the transfers of a link overlap."""

    def __init__(self) -> None:
        self._free_at: dict[str, list[int]] = defaultdict(list)
        self.of_transfer: dict[int, int] = {}

    def place(self, transfer: Record) -> int:
        """The first row of the transfer's lane that is free when it starts."""
        lane = f"link {transfer['cause']}"
        free_at = self._free_at[lane]
        row = next((row for row, end in enumerate(free_at) if end <= transfer["start"]), len(free_at))
        if row == len(free_at):
            free_at.append(0)
        free_at[row] = transfer["end"]
        self.of_transfer[transfer["id"]] = tid(lane) + row
        return tid(lane) + row

    def names(self) -> Iterator[Record]:
        yield {"ph": "M", "pid": PID, "tid": 0, "name": "process_name", "args": {"name": "SpecViz run"}}
        for order, lane in enumerate(LANES):
            for row in range(max(1, len(self._free_at[lane]))):
                thread = {"ph": "M", "pid": PID, "tid": tid(lane) + row}
                yield {**thread, "name": "thread_name", "args": {"name": f"{lane} {row + 1}" if row else lane}}
                yield {**thread, "name": "thread_sort_index", "args": {"sort_index": order * LANE_STRIDE + row}}


def tid(lane: str) -> int:
    """The thread number of a lane's first row."""
    return (LANES.index(lane) + 1) * LANE_STRIDE


def _slice(lane_tid: int, name: str, start: int, end: int, args: Record) -> Record:
    return {
        "ph": "X",
        "pid": PID,
        "tid": lane_tid,
        "name": name,
        "ts": start / 1000,
        "dur": max(0, end - start) / 1000,
        "args": args,
    }


def _round_slices(events: list[Record]) -> Iterator[Record]:
    """One slice a round: the sequences of a batch share its times, and their counts are summed."""
    rounds: dict[int, list[Record]] = defaultdict(list)
    for event in events:
        if event["kind"] == "round":
            rounds[event["round"]].append(event)
    for number, parts in rounds.items():
        args = {name: sum(part[name] for part in parts) for name in ("drafted", "verified", "accepted")}
        args |= {"round": number, "k": parts[0]["k"], "sequences": len(parts)}
        args["emitted"] = sum(len(part["tokens"]) for part in parts)
        yield _slice(tid("rounds"), f"round {number}", parts[0]["start"], parts[0]["verify_end"], args)


def _engine_slices(events: list[Record]) -> Iterator[Record]:
    for event in events:
        if event["kind"] == "stall":
            args = {name: event[name] for name in ("round", "layer")}
            yield _slice(tid("stall"), f"wait L{event['layer']}", event["start"], event["end"], args)
        elif event["kind"] == "compute":
            args = {name: event[name] for name in ("round", "layer", "rows", "lane")}
            name = event["op"] if event["layer"] < 0 else f"{event['op']} L{event['layer']}"
            yield _slice(tid(_lane(event)), name, event["start"], event["end"], args)


def _lane(compute: Record) -> str:
    if compute["lane"] == "draft":
        return "draft"
    return "experts" if compute["op"] == "experts" else "verify"


def _transfer_slices(events: list[Record], rows: _Rows) -> Iterator[Record]:
    outcomes = {event["id"]: event["outcome"] for event in events if event["kind"] == "settled"}
    moved = [event for event in events if event["kind"] == "transfer" and event["end"] > event["start"]]
    for event in sorted(moved, key=lambda event: event["start"]):
        args = {name: event[name] for name in ("id", "round", "layer", "expert", "bytes")}
        args |= {"outcome": outcomes.get(event["id"]), "queued_us": (event["start"] - event["queued"]) / 1000}
        args["paused_us"] = sum(end - start for start, end in event["pauses"]) / 1000
        name = f"L{event['layer']} E{event['expert']}"
        yield _slice(rows.place(event), name, event["start"], event["end"], args)


def _flows(events: list[Record], rows: _Rows) -> Iterator[Record]:
    """A slice inside each experts slice that used prefetched experts, and an arrow to it from each of the prefetches.

    Perfetto takes the slice that began first for the beginning of an arrow. The experts slice begins before a late
    prefetch does; the inner one begins when the last prefetch was there.
    """
    for use, transfers in _uses(events, rows):
        arrived = max(transfer["end"] for transfer in transfers)
        begin = min(max(use["start"] + 1, arrived), use["end"] - 1)
        args = {"round": use["round"], "layer": use["layer"], "prefetched": len(transfers)}
        yield _slice(tid("experts"), f"prefetched L{use['layer']}", begin, use["end"], args)
        for transfer in transfers:
            flow = {"pid": PID, "cat": "prefetch", "name": "prefetch", "id": transfer["id"]}
            # One nanosecond inside the slice: a flow binds to the slice that encloses its time.
            leave = max(transfer["start"], transfer["end"] - 1)
            yield {**flow, "ph": "s", "tid": rows.of_transfer[transfer["id"]], "ts": leave / 1000}
            yield {**flow, "ph": "f", "bp": "e", "tid": tid("experts"), "ts": begin / 1000}


def _uses(events: list[Record], rows: _Rows) -> Iterator[tuple[Record, list[Record]]]:
    """Each experts compute that used prefetched experts, and their transfers."""
    computes: dict[int, list[Record]] = defaultdict(list)
    for event in events:
        if event["kind"] == "compute" and _lane(event) == "experts":
            computes[event["layer"]].append(event)
    ends = {}
    for layer, own in computes.items():
        own.sort(key=lambda event: event["end"])
        ends[layer] = [event["end"] for event in own]
    prefetches = {e["id"]: e for e in events if e["kind"] == "transfer" and e["cause"] == "prefetch"}
    used: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for event in events:
        if event["kind"] != "settled" or event["outcome"] not in CONSUMED or event["id"] not in rows.of_transfer:
            continue
        transfer = prefetches.get(event["id"])
        if transfer is not None:
            layer = transfer["layer"]
            used[layer, bisect_left(ends.get(layer, []), event["t"])].append(transfer)
    for (layer, index), transfers in used.items():
        if index < len(computes[layer]):  # else the run ended, or was cut by the ring, before that slice
            yield computes[layer][index], transfers


def _counters(events: list[Record]) -> Iterator[Record]:
    moves: list[tuple[int, int]] = []
    emitted, counted = 0, -1
    for event in events:
        if event["kind"] == "cache":
            resident = sum(len(layer) for layer in event["resident"])
            yield _counter("resident", event["t"], {"experts": resident})
        if event["kind"] == "round":
            if event["round"] != counted:  # the first of a batch's sequences that is not over yet
                counted = event["round"]
                yield _counter("draft length", event["start"], {"k": event["k"]})
            emitted += len(event["tokens"])
            yield _counter("emitted", event["t"], {"tokens": emitted})
        if event["kind"] == "transfer" and event["end"] > event["start"]:
            moves += [(event["start"], event["bytes"]), (event["end"], -event["bytes"])]
    in_flight = 0
    for t, change in sorted(moves):
        in_flight += change
        yield _counter("in flight", t, {"bytes": in_flight})


def _counter(name: str, t: int, args: Record) -> Record:
    """Perfetto shows it as the name and the argument's name, e.g. "emitted tokens"."""
    return {"ph": "C", "pid": PID, "tid": 0, "name": name, "ts": t / 1000, "args": args}


def _marks(events: list[Record]) -> Iterator[Record]:
    """What happened at one moment: a phase began, a knob took effect, the drafter was switched off."""
    for event in events:
        if event["kind"] == "knob":
            yield _mark(event, f"{event['name']}: {event['old']} → {event['new']}", ("round", "version"))
        elif event["kind"] == "phase":
            yield _mark(event, event["phase"], ("detail",))
        elif event["kind"] == "draft_alarm":
            yield _mark(event, "draft switched off", ("round", "reason"))


def _mark(event: Record, name: str, arguments: tuple[str, ...]) -> Record:
    return {
        "ph": "i",
        "s": "g",
        "pid": PID,
        "tid": tid("rounds"),
        "name": name,
        "ts": event["t"] / 1000,
        "args": {argument: event[argument] for argument in arguments},
    }
