"""Everything the panels show, from a run's events: one pure reducer, with one formula for each number.

Acceptance rate = accepted / verified draft tokens. Acceptance at position i = accepted at i / rounds
that verified i. Mean acceptance length = 1 + accepted / rounds with a draft. Hit rate = (hits + late) /
requests. Overlap: see `engine.overlap`. Stall = time that the engine waited for an expert. All of them
are about decoding: what the prefill moved and waited for is forgotten when decoding begins.

`static/reducer.js` is the same reducer for the browser; `tests/golden` holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from engine.overlap import Overlap
from specviz.experts import Cache, Roofline, Transfers
from specviz.reducers import Acceptance, Clock, Control, Json

RUN_FACTS = ("schema", "model", "machine", "link", "config", "memory", "slots_per_layer", "started_unix")


class Metrics:
    """The state of one run. Feed it events in order with `add`; memory is bounded however long the run.

    An event is what `Event.to_json()` gives, with its sequence number as "seq" where it has one.
    Events seen before (by seq) are ignored; gaps are counted in `lost`.
    """

    def __init__(self) -> None:
        self.seq = self.lost = self.t = 0
        self.run: Json = {"status": "waiting", "error": None, "phase": None, "phase_t": None, "sequences": 0}
        self.facts: Json | None = None
        self.load: Json | None = None
        self.acceptance = Acceptance()
        self.clock = Clock()
        self.transfers = Transfers()
        self.overlap = Overlap()
        self.cache = Cache()
        self.roofline = Roofline()
        self.control = Control()
        self._handlers: dict[str, Callable[[Json], None]] = {
            "load": self._load,
            "run_start": self._run_start,
            "phase": self._phase,
            "round": self._round,
            "transfer": self._transfer,
            "settled": lambda event: self.transfers.settled(event),
            "compute": lambda event: self.overlap.compute(event["start"], event["end"]),
            "stall": self._stall,
            "cache": self.cache.state,
            "knob": self.control.knob,
            "governor": self.control.choice,
            "roofline": self.roofline.point,
            "run_end": self._run_end,
        }

    def add(self, event: Json) -> Metrics:
        """Take one event; unknown kinds are ignored, so that a newer engine does not break an older page."""
        seq = event.get("seq")
        if seq is not None:
            if seq <= self.seq:
                return self
            self.lost += seq - self.seq - 1
            self.seq = seq
        self.t = max(self.t, event["t"])
        handler = self._handlers.get(event["kind"])
        if handler:
            handler(event)
        return self

    def _load(self, event: Json) -> None:
        self.load = {key: event[key] for key in ("stage", "done_bytes", "total_bytes")}
        self.run["status"] = "loading"

    def _run_start(self, event: Json) -> None:
        self.facts = {key: event[key] for key in RUN_FACTS}
        self.run["status"] = "running"
        self.run["sequences"] = len(event["prompts"])
        self.cache.shape(event)

    def _phase(self, event: Json) -> None:
        self.run["phase"], self.run["phase_t"] = event["phase"], event["t"]
        if event["phase"] == "decode":
            self.transfers, self.overlap = Transfers(), Overlap()
            self.cache.begin_decode()
            self.clock.begin_decode()

    def _round(self, event: Json) -> None:
        self.acceptance.round(event)
        self.clock.round(event)
        # All compute up to the round's end is known by now.
        self.overlap.fold(event["t"])

    def _transfer(self, event: Json) -> None:
        self.transfers.transfer(event)
        self.overlap.transfer(event["start"], event["end"], event["pauses"])

    def _stall(self, event: Json) -> None:
        self.clock.waited(event)
        self.overlap.stall(event["start"], event["end"])

    def _run_end(self, event: Json) -> None:
        self.run["status"], self.run["error"] = event["status"], event["error"]
        self.overlap.fold()

    def to_json(self) -> dict[str, Any]:
        """All figures as plain JSON: times in ns, rates a second, shares in 0 … 1, null where not yet known."""
        return {
            "seq": self.seq,
            "lost": self.lost,
            "t": self.t,
            "run": dict(self.run),
            "facts": self.facts,
            "load": self.load,
            "acceptance": self.acceptance.to_json(),
            "time": self.clock.to_json(),
            "transfers": self.transfers.to_json(),
            "overlap": self.overlap.to_json(),
            "experts": self.cache.to_json(),
            "roofline": self.roofline.to_json(),
            "governor": self.control.governor_json(),
            "knobs": self.control.knobs_json(),
        }


def reduce(events: Iterable[Json]) -> Metrics:
    """The metrics of a whole run, e.g. of a recording."""
    metrics = Metrics()
    for event in events:
        metrics.add(event)
    return metrics
