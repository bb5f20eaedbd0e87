"""What the expert cache counts, and how each transfer is settled exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.offload.slots import Slot
from engine.offload.transfer import CANCELLED, DONE, Transfer


@dataclass
class CacheStats:
    """Totals since the last reset.

    `requests` are distinct experts a layer and pass; hits (resident) + late (a prefetch was still moving) +
    misses = requests. Every prefetch ends in exactly one of used, late, wasted, cancelled:
    their sum is `prefetched` once nothing is on its way. `bytes_loaded` are stored bytes that crossed the link,
    `bytes_wasted` those of them that prefetches moved for nothing: wasted, or cancelled on their way.
    """

    requests: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_cancelled: int = 0
    bytes_loaded: int = 0
    #: Missed experts that were computed where they lie instead of being fetched.
    computed: int = 0
    bytes_wasted: int = 0


@dataclass
class RoundCounts:
    """What happened since the last `take_round`: counts, [layer, expert] pairs in order, and experts a layer."""

    hits: int
    late: int
    misses: int
    evicted: list[list[int]]
    used: list[list[int]]


@dataclass
class RoundLog:
    """Gathers a `RoundCounts`."""

    layers: int
    hits: int = 0
    late: int = 0
    misses: int = 0
    evicted: list[list[int]] = field(default_factory=list)
    used: dict[int, set[int]] = field(default_factory=dict)

    def counts(self) -> RoundCounts:
        used = [sorted(self.used.get(layer, ())) for layer in range(self.layers)]
        return RoundCounts(self.hits, self.late, self.misses, self.evicted, used)


class CacheObserver(Protocol):
    """Hears what the cache does, from the engine's or a worker's thread, with the cache's lock held: be quick.

    `settled` follows `transfer` exactly once for each; outcomes are `engine.events.TRANSFER_OUTCOMES`.
    """

    def transfer(self, transfer: Transfer) -> None:
        """The link is done with it."""

    def settled(self, transfer_id: int, outcome: str) -> None:
        """What became of it."""

    def stall(self, layer: int, start_ns: int, end_ns: int) -> None:
        """The engine waited for experts of `layer`."""


class SilentObserver:
    """Hears and says nothing."""

    def transfer(self, transfer: Transfer) -> None:
        pass

    def settled(self, transfer_id: int, outcome: str) -> None:
        pass

    def stall(self, layer: int, start_ns: int, end_ns: int) -> None:
        pass


class Ledger:
    """The cache's books; guarded by the cache's lock. A prefetch that arrived stays open until used or wasted."""

    def __init__(self, layers: int, expert_nbytes: int, observer: CacheObserver | None) -> None:
        self.observer = observer or SilentObserver()
        self._layers = layers
        self._expert_nbytes = expert_nbytes
        self.clear()

    def clear(self) -> None:
        """All counts from zero."""
        self.stats = CacheStats()
        self._round = RoundLog(self._layers)

    def take_round(self) -> RoundCounts:
        """The round's counts, which start again from zero."""
        log, self._round = self._round, RoundLog(self._layers)
        return log.counts()

    def requested(self, layer: int, experts: Sequence[int], hits: int, late: int) -> None:
        """A pass asked for distinct `experts`; those neither hit nor late were missed."""
        self.stats.requests += len(experts)
        self._round.used.setdefault(layer, set()).update(experts)
        for counts in (self.stats, self._round):
            counts.hits += hits
            counts.late += late
            counts.misses += len(experts) - hits - late

    def evicted(self, layer: int, expert: int, slot: Slot) -> None:
        """`expert` made room."""
        self._round.evicted.append([layer, expert])
        self.settle_unused(slot, "wasted")

    def ended(self, slot: Slot, transfer: Transfer) -> None:
        """The link is done with the transfer into `slot`."""
        self.stats.bytes_loaded += transfer.bytes_moved
        self.observer.transfer(transfer)
        if transfer.cause == "demand":
            self.observer.settled(transfer.id, "cancelled" if transfer.state == CANCELLED else "demand")
        elif transfer.state == DONE and not slot.late:
            slot.unused_prefetch = transfer.id
        else:
            late = slot.late and transfer.state != CANCELLED
            self._settle_prefetch(transfer.id, "late" if late else "cancelled", transfer.bytes_moved)

    def settle_unused(self, slot: Slot, outcome: str) -> None:
        """If a prefetch brought the expert of `slot` and it was not used so far, it is "used" or "wasted" now."""
        if slot.unused_prefetch is not None:
            self._settle_prefetch(slot.unused_prefetch, outcome, self._expert_nbytes)
            slot.unused_prefetch = None

    def _settle_prefetch(self, transfer_id: int, outcome: str, nbytes: int) -> None:
        name = f"prefetch_{outcome}"
        setattr(self.stats, name, getattr(self.stats, name) + 1)
        if outcome in ("wasted", "cancelled"):
            self.stats.bytes_wasted += nbytes
        self.observer.settled(transfer_id, outcome)
