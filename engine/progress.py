"""How fast something long goes, and how long it will still take."""

from __future__ import annotations

from collections import deque

#: The rate is that of the last seconds: what a checked, resumed or cached part did says nothing of the rest.
WINDOW_S = 5.0
#: Rates over less are noise.
LEAST_S = 0.5


class Pace:
    """Bytes a second of the stage that runs now."""

    def __init__(self) -> None:
        self._stage = ""
        self._marks: deque[tuple[float, int]] = deque()

    def rate(self, stage: str, done: int, now: float) -> float | None:
        """Note that `done` bytes of `stage` are there at `now` (seconds); bytes a second, None while unknown."""
        if stage != self._stage or (self._marks and done < self._marks[-1][1]):
            self._stage = stage
            self._marks.clear()
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()
        since, before = self._marks[0]
        return (done - before) / (now - since) if now - since >= LEAST_S else None


def describe(stage: str, done: int, total: int, rate: float | None) -> str:
    """One line: the stage, its share of all bytes, the rate and the time left as far as they are known."""
    if not total:
        return stage
    parts = [f"{stage} {done / total:4.0%} of {total / 2**20:.0f} MiB"]
    if rate:
        parts += [f"{rate / 2**20:.0f} MiB/s", f"{_clock((total - done) / rate)} left"]
    return " · ".join(parts)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"
