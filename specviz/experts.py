"""The parts of `Metrics` about experts: what crossed the link, what the cache held, which resource is the limit.

`static/experts.js` is the same code for the browser (see `specviz.reducers`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from engine.events import TRANSFER_OUTCOMES
from specviz.reducers import SERIES_LIMIT, WINDOW_ROUNDS, Json, ratio

#: Operating points kept, for the fading trail.
POINTS_LIMIT = 120
#: Transfers whose fate is not yet known (an expert may stay resident, unused, for a long time).
UNSETTLED_LIMIT = 16_384
#: Heat is a moving average of "used in this round" (1 or 0) with this memory.
HEAT_KEEP = 0.9


class Transfers:
    """What crossed the link, why, and what became of it."""

    def __init__(self) -> None:
        self.causes = {cause: {"count": 0, "bytes": 0, "ns": 0} for cause in ("demand", "prefetch")}
        self.outcomes = {outcome: {"count": 0, "bytes": 0} for outcome in TRANSFER_OUTCOMES}
        # The two halves of one transfer come from different threads, in either order.
        self._moved: dict[int, int] = {}
        self._fates: dict[int, str] = {}

    def transfer(self, event: Json) -> None:
        cause = self.causes[event["cause"]]
        cause["count"] += 1
        cause["bytes"] += event["bytes"]
        cause["ns"] += event["end"] - event["start"]
        for start, end in event["pauses"]:
            cause["ns"] -= end - start
        outcome = self._fates.pop(event["id"], None)
        if outcome is None:
            self._remember(self._moved, event["id"], event["bytes"])
        else:
            self._settle(outcome, event["bytes"])

    def settled(self, event: Json) -> None:
        nbytes = self._moved.pop(event["id"], None)
        if nbytes is None:
            self._remember(self._fates, event["id"], event["outcome"])
        else:
            self._settle(event["outcome"], nbytes)

    def _settle(self, outcome: str, nbytes: int) -> None:
        self.outcomes[outcome]["count"] += 1
        self.outcomes[outcome]["bytes"] += nbytes

    @staticmethod
    def _remember(table: dict[int, Any], key: int, value: Any) -> None:
        table[key] = value
        if len(table) > UNSETTLED_LIMIT:
            del table[next(iter(table))]

    def to_json(self) -> Json:
        return {
            "by_cause": {cause: dict(sums) for cause, sums in self.causes.items()},
            "by_outcome": {outcome: dict(sums) for outcome, sums in self.outcomes.items()},
            "unsettled": len(self._moved),
        }


class Cache:
    """Where are the experts, and were they there in time? Requests count an expert once a layer and pass."""

    def __init__(self) -> None:
        self.hits = self.late = self.misses = self.evictions = 0
        self.slots: int | None = None
        self.resident: list[list[int]] = []
        self.used: list[list[int]] = []
        self.evicted: list[list[int]] = []
        self.heat: list[list[float]] = []
        self._series: deque[Json] = deque(maxlen=SERIES_LIMIT)

    def shape(self, event: Json) -> None:
        layers, experts = event["model"]["moe_layers"], event["model"]["experts"]
        self.slots = event["slots_per_layer"]
        self.resident, self.used = [[] for _ in range(layers)], [[] for _ in range(layers)]
        self.heat = [[0.0] * experts for _ in range(layers)]

    def begin_decode(self) -> None:
        """Forget what the prefill requested; what it left in the cache stays."""
        self.hits = self.late = self.misses = self.evictions = 0
        self._series.clear()

    def state(self, event: Json) -> None:
        self.hits += event["hits"]
        self.late += event["late"]
        self.misses += event["misses"]
        self.evictions += len(event["evicted"])
        self.slots = event["slots_per_layer"]
        self.resident, self.used, self.evicted = event["resident"], event["used"], event["evicted"]
        for layer, row in enumerate(self.heat):
            for expert in range(len(row)):
                row[expert] *= HEAT_KEEP
            for expert in self.used[layer] if layer < len(self.used) else ():
                row[expert] += 1 - HEAT_KEEP
        self._series.append({key: event[key] for key in ("round", "hits", "late", "misses")})

    def to_json(self) -> Json:
        requests = self.hits + self.late + self.misses
        window = {"hits": 0, "late": 0, "misses": 0}
        for point in list(self._series)[-WINDOW_ROUNDS:]:
            for key in window:
                window[key] += point[key]
        recent = window["hits"] + window["late"] + window["misses"]
        return {
            "requests": requests,
            "hits": self.hits,
            "late": self.late,
            "misses": self.misses,
            "hit_rate": ratio(self.hits + self.late, requests),
            "ready_rate": ratio(self.hits, requests),
            "window": {**window, "requests": recent, "hit_rate": ratio(window["hits"] + window["late"], recent)},
            "evictions": self.evictions,
            "slots_per_layer": self.slots,
            "resident": self.resident,
            "used": self.used,
            "evicted": self.evicted,
            "heat": [list(row) for row in self.heat],
            "series": [dict(point) for point in self._series],
        }


class Roofline:
    """Which resource is the limit? Points of the amortization roofline (MoE-SpeQ, section 3.2)."""

    KEYS = ("round", "k", "tokens", "seconds", "sync_bytes", "moved_bytes")

    def __init__(self) -> None:
        self._points: deque[Json] = deque(maxlen=POINTS_LIMIT)
        self.link: float | None = None

    def point(self, event: Json) -> None:
        point = {key: event[key] for key in self.KEYS}
        point["compute_roof"] = event["compute_tokens_per_s"]
        point["rate"] = ratio(event["tokens"], event["seconds"])
        point["intensity"] = ratio(event["tokens"], event["sync_bytes"])
        self.link = event["link_bytes_per_s"]
        self._points.append(point)

    def _window(self) -> Json:
        """The last rounds as one operating point: sums, not averages of ratios."""
        points = list(self._points)[-WINDOW_ROUNDS:]
        tokens = sync_bytes = 0
        seconds = compute_seconds = 0.0
        for point in points:
            tokens += point["tokens"]
            sync_bytes += point["sync_bytes"]
            seconds += point["seconds"]
            compute_seconds += point["tokens"] / point["compute_roof"] if point["compute_roof"] else 0.0
        intensity = ratio(tokens, sync_bytes)
        io_roof = intensity * self.link if intensity is not None and self.link is not None else None
        compute_roof = ratio(tokens, compute_seconds)
        linked = io_roof is not None and (compute_roof is None or io_roof < compute_roof)
        return {
            "rounds": len(points),
            "tokens": tokens,
            "seconds": seconds,
            "sync_bytes": sync_bytes,
            "rate": ratio(tokens, seconds),
            "intensity": intensity,
            "io_roof": io_roof,
            "compute_roof": compute_roof,
            "bound": ("link" if linked else "compute") if points else None,
        }

    def to_json(self) -> Json:
        return {
            "link_bytes_per_s": self.link,
            "points": [dict(point) for point in self._points],
            "window": self._window(),
        }
