"""The rounds of a run as the tuner sees them: what each operator took, and what was fetched."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

from engine import events
from engine.bench.batch_run import LinkWatch
from engine.events import Event
from engine.intervals import covered


@dataclass(frozen=True)
class MeasuredRound:
    """Seconds of one round: of the draft, of the verifying pass by operator, without waiting; `stall` is the waiting.

    Experts over all layers: `wanted` distinct ones, `asked` that were fetched when the router asked, `foreseen` that
    were fetched ahead. `lengths`: draft tokens that were verified and accepted, a sequence.
    """

    drafted: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    tokens: int
    seconds: float
    draft: float
    shared: float
    experts: float
    head: float
    stall: float
    overhead: float
    wanted: int
    asked: float
    foreseen: float


class RoundWatch:
    """Hears a run's events, from any thread, and sets `stop` when `done()` says so at the end of a round."""

    def __init__(self, expert_bytes: int, stop: threading.Event) -> None:
        self.rounds: list[MeasuredRound] = []
        self.link = LinkWatch()
        self._expert_bytes = expert_bytes
        self._stop = stop
        self._parts: list[events.Round] = []
        self._ops: dict[str, int] = defaultdict(int)
        self._wanted = 0
        self._moved: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def hear(self, event: Event) -> None:
        """Any event of the run."""
        self.link.hear(event)
        if isinstance(event, events.Transfer):
            with self._lock:
                self._moved[event.cause] += event.bytes
        elif isinstance(event, events.Compute) and event.lane == "verify":
            self._ops[event.op] += event.end - event.start
        elif isinstance(event, events.Round):
            self._parts.append(event)
        elif isinstance(event, events.CacheState):
            self._wanted = event.hits + event.late + event.misses
        elif isinstance(event, events.RooflinePoint):
            self.rounds.append(self._close(event))
            if self.done():
                self._stop.set()

    def done(self) -> bool:
        """Whether the run may end; for those who know how much they want."""
        return False

    @property
    def load_seconds(self) -> float:
        """Seconds of the link for one expert, over the whole run; 0 when nothing moved."""
        moved = sum(nbytes for _, nbytes in self.link.loads)
        return covered(self.link.busy) / 1e9 * self._expert_bytes / moved if moved and self.link.rounds else 0.0

    def _close(self, point: events.RooflinePoint) -> MeasuredRound:
        parts, self._parts = self._parts, []
        ops, self._ops = self._ops, defaultdict(int)
        with self._lock:
            moved, self._moved = self._moved, defaultdict(int)
        first = parts[0]
        return MeasuredRound(
            drafted=tuple(part.drafted for part in parts),
            lengths=tuple((part.verified, part.accepted) for part in parts),
            tokens=sum(len(part.tokens) for part in parts),
            seconds=point.seconds,
            draft=(first.draft_end - first.start) / 1e9,
            shared=ops["attention"] / 1e9,
            experts=max(ops["experts"] - first.stall_ns, 0) / 1e9,
            head=ops["head"] / 1e9,
            stall=first.stall_ns / 1e9,
            overhead=max(point.seconds - (first.verify_end - first.start) / 1e9, 0.0),
            wanted=self._wanted,
            asked=moved["demand"] / self._expert_bytes,
            foreseen=moved["prefetch"] / self._expert_bytes,
        )
