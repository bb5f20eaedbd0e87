"""The parts of `Metrics` about tokens, time and control, one class for each question that a panel answers.

Each takes event objects (`Event.to_json()`) and gives a plain JSON object. `static/reducers.js` is the
same code for the browser, and golden files hold the two to equal results: so sums are written as
loops (the built-in `sum` of newer Pythons rounds floats differently) and powers are avoided.
"""

from __future__ import annotations

from collections import deque
from typing import Any

Json = dict[str, Any]

#: Rounds that windowed figures look back on.
WINDOW_ROUNDS = 20
#: Nanoseconds that the windowed token rate looks back on.
WINDOW_NS = 1_000_000_000
#: Points kept of each curve, and of knob changes.
SERIES_LIMIT = 1000


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None (null) where nothing was counted."""
    return part / whole if whole else None


class Acceptance:
    """Is the draft good here? Counts over rounds; a round of a batch is one round a sequence."""

    def __init__(self) -> None:
        self.rounds = self.speculative = self.drafted = self.verified = self.accepted = self.emitted = 0
        self.positions: list[list[int]] = []
        self.histogram: list[int] = []
        self.states = {"plain": 0, "accepted": 0, "corrected": 0, "bonus": 0}
        self.rejected = self.unreached = 0
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=WINDOW_ROUNDS)

    def round(self, event: Json) -> None:
        drafted, verified, accepted = event["drafted"], event["verified"], event["accepted"]
        emitted = len(event["tokens"])
        self.rounds += 1
        self.speculative += drafted > 0
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.emitted += emitted
        while len(self.positions) < verified:
            self.positions.append([0, 0])
        for position in range(verified):
            self.positions[position][0] += 1
            self.positions[position][1] += position < accepted
        while len(self.histogram) <= emitted:
            self.histogram.append(0)
        self.histogram[emitted] += 1
        for token in event["tokens"]:
            if token["state"] in self.states:
                self.states[token["state"]] += 1
        for token in event["rejected"]:
            self.rejected += bool(token["verified"])
            self.unreached += not token["verified"]
        self._recent.append((drafted, verified, accepted))

    def to_json(self) -> Json:
        drafting = verified = accepted = 0
        for recent in self._recent:
            drafting += recent[0] > 0
            verified += recent[1]
            accepted += recent[2]
        return {
            "rounds": self.rounds,
            "speculative_rounds": self.speculative,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            # Tokens that a length limit, a stop string or the end of the text cut off accepted chunks.
            "cut": self.accepted + self.rounds - self.emitted,
            "states": dict(self.states),
            "rejected": self.rejected,
            "unreached": self.unreached,
            "rate": ratio(self.accepted, self.verified),
            "mean_length": 1 + self.accepted / self.speculative if self.speculative else None,
            "by_position": [{"verified": n, "accepted": hit, "rate": hit / n} for n, hit in self.positions],
            "tokens_per_round": list(self.histogram),
            "window": {
                "rounds": len(self._recent),
                "rate": ratio(accepted, verified),
                "mean_length": 1 + accepted / drafting if drafting else None,
            },
        }


class Clock:
    """Does it pay? Time split and tokens a second. The rounds of a batch share one pass, counted once."""

    def __init__(self) -> None:
        self.tokens = self.passes = self.draft = self.verify = self.stall = 0
        self.start: int | None = None
        self.end = 0
        self.stalls = self.stalled = 0
        self._last_round: int | None = None
        self._recent: deque[tuple[int, int, int]] = deque()
        self._series: deque[Json] = deque(maxlen=SERIES_LIMIT)

    def round(self, event: Json) -> None:
        self.start = event["start"] if self.start is None else self.start
        self.end = max(self.end, event["t"])
        self.tokens += len(event["tokens"])
        fresh = event["round"] != self._last_round
        if fresh:
            self.passes += 1
            self.draft += event["draft_end"] - event["start"]
            self.verify += event["verify_end"] - event["verify_start"] - event["stall_ns"]
            self.stall += event["stall_ns"]
            self._last_round = event["round"]
        self._recent.append((event["start"], event["t"], len(event["tokens"])))
        while self._recent[0][1] <= self.end - WINDOW_NS:
            self._recent.popleft()
        if not fresh:
            self._series.pop()
        self._series.append({"round": event["round"], "t": self.end, "rate": self._rate(), "mean": self._mean()})

    def begin_decode(self) -> None:
        """Forget what the prefill waited for."""
        self.stalls = self.stalled = 0

    def waited(self, event: Json) -> None:
        self.stalls += 1
        self.stalled += event["end"] - event["start"]

    def _mean(self) -> float | None:
        return ratio(self.tokens * 1e9, self.end - (self.start or 0))

    def _rate(self) -> float | None:
        """Tokens/s in the last second, each round's tokens spread evenly over its time."""
        low = max(self.end - WINDOW_NS, self.start or 0)
        tokens = 0.0
        for start, end, count in self._recent:
            tokens += count * ((end - max(start, low)) / (end - start)) if end > start else count
        return ratio(tokens * 1e9, self.end - low)

    def to_json(self) -> Json:
        decode = self.end - self.start if self.start is not None else 0
        return {
            "passes": self.passes,
            "decode_ns": decode,
            "draft_ns": self.draft,
            "verify_ns": self.verify,
            "stall_ns": self.stall,
            "other_ns": decode - self.draft - self.verify - self.stall,
            "stall_share": ratio(self.stall, decode),
            "stalls": self.stalls,
            "stalled_ns": self.stalled,
            "rate": self._series[-1]["rate"] if self._series else None,
            "mean_rate": self._series[-1]["mean"] if self._series else None,
            "series": [dict(point) for point in self._series],
        }


class Control:
    """Why this k? The governor's choices, and the knobs that a person moved."""

    CHOICE = ("round", "t", "k", "auto", "probing", "reason")
    CURVES = ("expected_tokens", "predicted_seconds", "predicted_rate")
    KNOB = ("round", "t", "name", "old", "new", "version")

    def __init__(self) -> None:
        self._choices: deque[Json] = deque(maxlen=SERIES_LIMIT)
        self._knobs: deque[Json] = deque(maxlen=SERIES_LIMIT)
        self._latest: Json | None = None

    def choice(self, event: Json) -> None:
        # Runs recorded before the governor chose it do not tell whether there was prefetching.
        chosen = {key: event[key] for key in self.CHOICE} | {"prefetch": event.get("prefetch", False)}
        self._choices.append(chosen)
        self._latest = chosen | {key: event[key] for key in self.CURVES}

    def knob(self, event: Json) -> None:
        self._knobs.append({key: event[key] for key in self.KNOB})

    def governor_json(self) -> Json:
        return {"latest": self._latest, "series": [dict(choice) for choice in self._choices]}

    def knobs_json(self) -> list[Json]:
        return [dict(knob) for knob in self._knobs]
