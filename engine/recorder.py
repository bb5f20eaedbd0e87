"""What a run did, as events and as totals: the one place where the engine keeps time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import events
from engine.events import Event
from engine.intervals import Interval, clip, covered, merge
from engine.offload.transfer import Transfer
from engine.overlap import Overlap, moving


@dataclass
class Totals:
    """Sums over a run's decoding rounds, each sequence of a batch counting its own. Times in ns."""

    rounds: int = 0
    drafting_rounds: int = 0
    verified: int = 0
    accepted: int = 0
    verified_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_ns: int = 0
    verify_ns: int = 0
    stall_ns: int = 0

    def add(self, rounds: list[events.Round]) -> None:
        """One round of all sequences of the batch."""
        for r in rounds:
            self.rounds += 1
            self.drafting_rounds += r.drafted > 0
            self.verified += r.verified
            self.accepted += r.accepted
            for position in range(r.verified):
                if position == len(self.verified_at):
                    self.verified_at.append(0)
                    self.accepted_at.append(0)
                self.verified_at[position] += 1
                self.accepted_at[position] += position < r.accepted
        first = rounds[0]
        self.draft_ns += first.draft_end - first.start
        self.verify_ns += first.verify_end - first.verify_start - first.stall_ns
        self.stall_ns += first.stall_ns


class Recorder:
    """Turns what happens into events, with times relative to the run's start, and keeps the totals.

    Called by the engine thread, and by link workers for transfers. `emit` must be quick and thread-safe; what it raises
    is kept for `check`, because it may be called in the middle of a change to the cache, or in a link's thread.
    """

    def __init__(self, emit: Callable[[Event], None] | None) -> None:
        self._listener = emit or (lambda event: None)
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._origin = time.perf_counter_ns()
        self.started_unix = time.time()
        self.round = 0
        self.decode_end = 0
        self.totals = Totals()
        self._overlap = Overlap()
        self._moved: list[tuple[list[Interval], int]] = []
        self._round_stalls: list[Interval] = []

    def now(self) -> int:
        """ns since the run's start."""
        return time.perf_counter_ns() - self._origin

    def emit(self, event: Event) -> None:
        """Tell the listener, also one that failed before: it may still want to hear how the run ends."""
        try:
            self._listener(event)
        except BaseException as error:
            self._failure = self._failure or error

    def check(self) -> None:
        """Raise what the listener raised first, if it did."""
        if self._failure is not None:
            raise self._failure

    def begin_round(self, number: int) -> None:
        self.round = number
        with self._lock:
            self._moved.clear()
        self._round_stalls.clear()

    def begin_decode(self) -> None:
        """The prefill is done. What `overlap` counts starts here."""
        self.decode_end = self.now()
        with self._lock:
            self._overlap = Overlap()

    def resume_decode(self) -> None:
        """Others have joined: the next round begins now."""
        self.decode_end = self.now()

    def end_round(self, rounds: list[events.Round]) -> None:
        """All sequences' parts of the round that is over."""
        for event in rounds:
            self.emit(event)
        self.totals.add(rounds)
        with self._lock:
            self._overlap.fold(rounds[0].t)
        self.decode_end = self.now()

    def compute(self, lane: str, op: str, layer: int, rows: int, start: int, end: int) -> None:
        """A slice of compute; what it waited for inside is told by `stall`."""
        self._overlap.compute(start, end)
        self.emit(events.Compute(end, self.round, lane, op, layer, rows, start, end))

    # What the expert cache reports (its observer).

    def transfer(self, transfer: Transfer) -> None:
        start, end = (self._relative(transfer.start_ns), self._relative(transfer.end_ns))
        queued = self._relative(transfer.queued_ns)
        if not transfer.start_ns:  # cancelled while it waited
            start = end = max(end, queued)
        pauses = [[self._relative(since), self._relative(until)] for since, until in transfer.pauses]
        if transfer.bytes_moved:
            with self._lock:
                self._moved.append((moving(start, end, pauses), transfer.bytes_moved))
                self._overlap.transfer(start, end, pauses)
        self.emit(
            events.Transfer(end, transfer.id, self.round, transfer.layer, transfer.expert, transfer.cause,
                            queued, start, end, transfer.bytes_moved, pauses)
        )  # fmt: skip

    def settled(self, transfer_id: int, outcome: str) -> None:
        self.emit(events.Settled(self.now(), transfer_id, outcome))

    def stall(self, layer: int, start_ns: int, end_ns: int) -> None:
        interval = self._relative(start_ns), self._relative(end_ns)
        self._overlap.stall(*interval)
        self._round_stalls.append(interval)
        self.emit(events.Stall(interval[1], self.round, layer, *interval))

    # Sums.

    def round_stall_ns(self) -> int:
        return covered(merge(self._round_stalls))

    def round_moved_bytes(self) -> tuple[int, int]:
        """(all bytes moved, those moved while the engine waited) by transfers that ended in this round."""
        stalls = merge(self._round_stalls)
        with self._lock:
            moved = list(self._moved)
        waited = 0.0
        for stretches, nbytes in moved:
            under_stall = sum(covered(clip(stalls, stretch)) for stretch in stretches)
            waited += nbytes * under_stall / max(covered(stretches), 1)
        return sum(nbytes for _, nbytes in moved), round(waited)

    def overlap(self) -> tuple[int, int]:
        """(ns of transfers, ns of transfers under compute), once the run is over."""
        with self._lock:
            self._overlap.fold()
        return self._overlap.transfer_ns, self._overlap.overlapped_ns

    def _relative(self, ns: int) -> int:
        return max(ns - self._origin, 0)
