"""The expert cache: fixed slots a layer, filled by demand and prefetch over one link."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from engine.errors import BudgetError
from engine.model.device import CPU
from engine.model.layout import ExpertTable
from engine.offload.links import Link
from engine.offload.policies import Plan, create_policy
from engine.offload.shelves import Shelves
from engine.offload.slot_pool import SlotPool
from engine.offload.slots import slot_nbytes
from engine.offload.stats import CacheObserver, CacheStats, Ledger, RoundCounts
from engine.offload.stream import ExpertStream, Lease

TIMEOUT_S = 30.0


class ExpertCache:
    """Holds up to `slots_per_layer` experts a layer and `extra` more on `device`, and loads others over `link`.

    One thread streams; any may prefetch, resize or look. `policy` is a name of `create_policy`; one that looks ahead
    shares some slots between the layers (`Shelves`), so that a layer may hold a few experts more and others fewer.
    A transfer that makes no progress for `timeout_s` seconds is given up. Raises BudgetError for less than one slot
    a layer.
    """

    def __init__(
        self,
        table: ExpertTable,
        slots_per_layer: int,
        dtype: torch.dtype,
        link: Link,
        policy: str = "lookahead",
        observer: CacheObserver | None = None,
        timeout_s: float = TIMEOUT_S,
        extra: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.table = table
        self.link = link
        self._capacity = self._checked(slots_per_layer)
        self._extra = extra
        self._slot_nbytes = slot_nbytes(table.shape, dtype)
        self._streaming = False
        self.ledger = Ledger(table.layers, link.source.expert_nbytes, observer)
        shelves = Shelves(table.shape, dtype, table.layers, device)
        self.pool = SlotPool(shelves, link, create_policy(policy), self.ledger, timeout_s)
        self._share_out()

    # Streaming.

    def stream(
        self,
        layer: int,
        experts: Sequence[int],
        scores: Mapping[int, float] | None = None,
        *,
        elsewhere: Sequence[int] = (),
        stop: threading.Event | None = None,
    ) -> ExpertStream:
        """Lease each distinct one of `experts` once: resident ones first, late and missing ones as they arrive.

        Hits, late ones and misses are counted now, and demands start now. A lease ends when the stream advances
        or closes; fewer slots than experts is fine, a slot is refilled as soon as its lease ends. One stream is
        open at a time: opening another closes it. The stream raises Cancelled once `stop` is set, TransferError
        when an expert cannot be read. Those `elsewhere` are missed, too, but left to the caller, who computes them
        where they lie.
        """
        with self.pool.lock:
            self._close_stream()
            distinct = list(dict.fromkeys(experts))
            self.pool.shelves.at = layer
            self.pool.policy.tick(layer)
            for expert in distinct:
                self.pool.policy.touch(layer, expert, 1.0 if scores is None else scores.get(expert, 0.0))
            wanted = [expert for expert in distinct if expert not in elsewhere]
            stream = self.pool.waiter = ExpertStream(self.pool, layer, self.pool.policy.load_order(layer, wanted), stop)
            hits, late = stream.adopt_present()
            self.ledger.requested(layer, distinct, hits, late)
            self.ledger.stats.computed += len(elsewhere)
            try:
                stream.request()
            except BaseException:
                stream.close()
                raise
            return stream

    def rejected(self, layer: int, wanted: Mapping[int, float], kept: Collection[int]) -> None:
        """Tokens of the last pass were rejected: what only they wanted is the first to go (admission by acceptance).

        `wanted` are the gate weights of the rejected rows, `kept` the experts of the others.
        """
        with self.pool.lock:
            self.pool.policy.reject(layer, wanted, kept)

    @contextmanager
    def lend(self, layer: int, experts: Iterable[int]) -> Iterator[dict[int, Lease]]:
        """Those of `experts` that are resident now, kept until the block ends. For a draft that takes what is there.

        It is no request: nothing is loaded or waited for, and neither the policy nor the counts hear of it.
        """
        with self.pool.lock:
            found = [(expert, self.pool.find(layer, expert)) for expert in experts]
            # What a stream has pinned is its own to release.
            lent = {expert: slot for expert, slot in found if slot is not None and slot.evictable}
            for slot in lent.values():
                slot.pinned = True
        try:
            yield {expert: Lease(expert, slot.gate_up, slot.down) for expert, slot in lent.items()}
        finally:
            with self.pool.lock:
                for slot in lent.values():
                    slot.pinned = False
                self.pool.trim(layer)

    # Looking ahead.

    def has(self, layer: int, expert: int) -> bool:
        """Whether it is resident or on its way."""
        with self.pool.lock:
            return expert in self.pool.shelves[layer].by_expert

    def prefetch(self, layer: int, expert: int, deadline: int, keep: Collection[int] = ()) -> bool:
        """Start to fetch `expert` ahead of its request, if a slot can be had; says whether it did.

        Never evicts an expert that is leased or that the plan wants, nor one of the layer's that are in `keep`.
        Prefetches go by `deadline`, earliest first.
        """
        with self.pool.lock:
            if expert in self.pool.shelves[layer].by_expert:
                return False
            if not self.pool.prefetch(layer, expert, deadline, {*self.pool.planned(layer), *keep}):
                return False
            self.ledger.stats.prefetched += 1
            return True

    def approach(self, layer: int) -> None:
        """The decoder comes to `layer`: the one behind it is needed last, and lends its spare slots first."""
        with self.pool.lock:
            self.pool.shelves.at = layer

    def set_streaming(self, streaming: bool) -> None:
        """Whether whole layers stream through, which takes fewer spare slots."""
        with self.pool.lock:
            if streaming != self._streaming:
                self._streaming = streaming
                self._share_out()
                self.pool.lock.notify_all()

    def plan(self, wanted: Plan | None) -> None:
        """What the next verification wants, per layer: expert → gate weight. May still grow; None forgets it."""
        with self.pool.lock:
            self.pool.plan = wanted
            self.pool.shelves.at = 0
            self.pool.policy.set_plan(wanted)

    def cancel_unplanned(self) -> int:
        """Cancel the prefetches on their way that the plan does not want; says how many."""
        with self.pool.lock:
            return self.pool.cancel(
                (layer, slot)
                for layer, shelf in enumerate(self.pool.shelves)
                for slot in shelf.slots
                if slot.expert not in self.pool.planned(layer)
            )

    def cancel_prefetches(self) -> int:
        """Cancel all prefetches on their way but those that a stream waits for; says how many."""
        with self.pool.lock:
            return self.pool.cancel(
                (layer, slot) for layer, shelf in enumerate(self.pool.shelves) for slot in shelf.slots
            )

    @property
    def prefetching(self) -> int:
        """Prefetches on their way."""
        return len(self.pool.prefetching)

    # Settings, and the ends of runs.

    @property
    def slots_per_layer(self) -> int:
        """How many experts of each layer may be resident, on average."""
        return self._capacity

    @property
    def total_slots(self) -> int:
        """How many experts may be resident, of all layers together."""
        layers = self.table.layers
        return min(self._capacity * layers + self._extra, self.table.experts * layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots allocated so far."""
        with self.pool.lock:
            return self._slot_nbytes * sum(len(shelf.slots) for shelf in self.pool.shelves)

    @property
    def capacity_nbytes(self) -> int:
        """Bytes of all slots that may be allocated."""
        return self._slot_nbytes * self.total_slots

    def resize(self, slots_per_layer: int) -> None:
        """Another number of slots a layer, at once; leased ones in excess go when they are released."""
        with self.pool.lock:
            self._capacity = self._checked(slots_per_layer)
            self._share_out()
            self.pool.lock.notify_all()

    def set_policy(self, name: str) -> None:
        """Another eviction policy, which starts to learn now. Raises UsageError for an unknown name."""
        policy = create_policy(name)
        with self.pool.lock:
            policy.set_plan(self.pool.plan)
            self.pool.policy = policy
            self._share_out()
            self.pool.lock.notify_all()

    def settle(self) -> None:
        """The run is over: close its stream, cancel its prefetches, and call what was never used wasted.

        Experts stay resident.
        """
        with self.pool.lock:
            self._close_stream()
            self.plan(None)
            self.cancel_prefetches()
            if not self.pool.lock.wait_for(lambda: not self.pool.in_flight(), self.pool.timeout_s):
                self.link.expire(self.pool.in_flight(), self.pool.timeout_s)
            for shelf in self.pool.shelves:
                for slot in shelf.slots:
                    self.ledger.settle_unused(slot, "wasted")

    def reset(self) -> None:
        """Empty the cache and its counts, so that contenders start alike; keeps the policy's kind."""
        with self.pool.lock:
            self.settle()
            for shelf in self.pool.shelves:
                for slot in list(shelf.slots):
                    shelf.clear(slot)
            self.pool.policy = type(self.pool.policy)()
            self.ledger.clear()

    def close(self) -> None:
        """Settle and free all slots. The link stays open: it belongs to the caller."""
        with self.pool.lock:
            self.settle()
            for layer, shelf in enumerate(self.pool.shelves):
                for slot in list(shelf.slots):
                    self.pool.shelves.drop(layer, slot)

    # What it knows.

    @property
    def stats(self) -> CacheStats:
        """A copy of the totals."""
        with self.pool.lock:
            return dataclasses.replace(self.ledger.stats)

    def take_round(self) -> RoundCounts:
        """Counts since the last call, which start again from zero."""
        with self.pool.lock:
            return self.ledger.take_round()

    def resident(self) -> list[list[int]]:
        """The resident experts of each layer."""
        with self.pool.lock:
            return [shelf.resident() for shelf in self.pool.shelves]

    # Called with the lock held.

    def _checked(self, slots_per_layer: int) -> int:
        if slots_per_layer < 1:
            raise BudgetError("the expert cache needs at least 1 slot a layer: allow it more memory")
        return min(slots_per_layer, self.table.experts)

    def _share_out(self) -> None:
        self.pool.shelves.share_out(self.total_slots, self._spare())
        for layer in range(self.table.layers):
            self.pool.trim(layer)

    def _spare(self) -> int:
        """Slots that layers lend each other.

        Behind a policy that looks ahead one a layer, where two are left, and those that are too few for all layers.
        While whole layers stream through, as many as hold two layers' absent experts: one is computed, the next one
        arrives. More would keep nothing that is needed sooner.
        """
        layers, total = self.table.layers, self.total_slots
        if self._streaming:
            # Twice what a layer lacks: spare = 2 (experts - (total - spare) / layers).
            spare = -(-2 * (self.table.experts * layers - total) // max(1, layers - 2))
            return max(0, min(spare, total - layers))
        if not self.pool.policy.lends:
            return 0
        return total - layers * max(1, self._capacity - 1)

    def _close_stream(self) -> None:
        if self.pool.waiter is not None:
            self.pool.waiter.close()
