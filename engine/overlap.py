"""How much of the link's work ran under compute: exact interval arithmetic in bounded memory.

    overlap = Σ |a transfer's time on the link ∩ busy| / Σ |a transfer's time on the link|
    busy    = union of Compute intervals − union of Stall intervals

A stall is taken out because the compute interval of a layer's experts spans the wait for one of them:
a transfer that the engine waited for was not hidden. Two transfers at the same time count one each; while
others overtake a transfer, it is not on the link. The engine's summary and the page's metrics both use this.
"""

from __future__ import annotations

from bisect import bisect_right

from engine.intervals import Interval, merge, subtract

#: Busy intervals remembered. A transfer that began before the oldest one counts as exposed up to there;
#: a round has about 40 intervals and a transfer lasts a few rounds at most.
BUSY_LIMIT = 8192


def moving(start: int, end: int, pauses: list[list[int]]) -> list[Interval]:
    """The stretches of start … end outside `pauses` (sorted): when a transfer was on the link."""
    stretches: list[Interval] = []
    for pause_start, pause_end in [*pauses, [end, end]]:
        if pause_start > start:
            stretches.append((start, pause_start))
        start = pause_end
    return stretches


class Overlap:
    """Sums the time of transfers and the part of it that ran under compute.

    Events of one round arrive in any order, transfers from other threads too. So they wait until the
    round's end (`fold`), when all compute up to then is known; a transfer still under way waits longer.
    """

    def __init__(self) -> None:
        self._compute: list[Interval] = []
        self._stalls: list[Interval] = []
        self._transfers: list[Interval] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before: list[int] = []  # busy nanoseconds before each interval, so that a sum is a subtraction
        self.transfer_ns = 0
        self.overlapped_ns = 0

    def compute(self, start: int, end: int) -> None:
        """The engine computed from `start` to `end` (ns)."""
        self._compute.append((start, end))

    def stall(self, start: int, end: int) -> None:
        """The engine waited for experts from `start` to `end` (ns)."""
        self._stalls.append((start, end))

    def transfer(self, start: int, end: int, pauses: list[list[int]]) -> None:
        """An expert was on the link from `start` to `end` (ns), but for `pauses` in between."""
        self._transfers += moving(start, end, pauses)

    def fold(self, until: int | None = None) -> None:
        """Account for the transfers that ended by `until` (ns), all of them when it is None."""
        for start, end in subtract(merge(self._compute), merge(self._stalls)):
            self._append(start, end)
        self._compute, self._stalls = [], []
        waiting: list[Interval] = []
        for start, end in self._transfers:
            if until is not None and end > until:
                waiting.append((start, end))
            else:
                self.transfer_ns += end - start
                self.overlapped_ns += self._busy_before(end) - self._busy_before(start)
        self._transfers = waiting

    def _append(self, start: int, end: int) -> None:
        if self._ends:
            start = max(start, self._ends[-1])
        if start >= end:
            return
        before = self._before[-1] + self._ends[-1] - self._starts[-1] if self._ends else 0
        self._starts.append(start)
        self._ends.append(end)
        self._before.append(before)
        if len(self._starts) > BUSY_LIMIT:
            for column in (self._starts, self._ends, self._before):
                del column[: BUSY_LIMIT // 2]

    def _busy_before(self, t: int) -> int:
        at = bisect_right(self._starts, t) - 1
        if at < 0:
            return self._before[0] if self._before else 0
        return self._before[at] + min(t, self._ends[at]) - self._starts[at]

    def to_json(self) -> dict[str, int | float | None]:
        """Nanoseconds, and `overlap` in 0 … 1 (null before the first transfer)."""
        return {
            "transfer_ns": self.transfer_ns,
            "overlapped_ns": self.overlapped_ns,
            "exposed_ns": self.transfer_ns - self.overlapped_ns,
            "overlap": self.overlapped_ns / self.transfer_ns if self.transfer_ns else None,
        }
