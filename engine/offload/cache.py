"""The expert cache: fixed slots a layer, filled by demand and prefetch over one link."""

from __future__ import annotations

import dataclasses
import functools
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
from engine.offload.slots import Slot, slot_nbytes
from engine.offload.stats import CacheObserver, CacheStats, Ledger, RoundCounts
from engine.offload.stream import ExpertStream, Lease
from engine.offload.transfer import DONE, Transfer

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
        self.timeout_s = timeout_s
        #: Guards everything; re-entrant, because a cancelled transfer may end inside the call that cancels it.
        self.lock = threading.Condition(threading.RLock())
        self._capacity = self._checked(slots_per_layer)
        self._extra = extra
        self._slot_nbytes = slot_nbytes(table.shape, dtype)
        self._shelves = Shelves(table.shape, dtype, table.layers, device)
        self._policy = create_policy(policy)
        self._plan: Plan | None = None
        self._streaming = False
        self._stream: ExpertStream | None = None
        self._prefetching: set[int] = set()
        self.ledger = Ledger(table.layers, link.source.expert_nbytes, observer)
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
        with self.lock:
            self._close_stream()
            distinct = list(dict.fromkeys(experts))
            self._shelves.at = layer
            self._policy.tick(layer)
            for expert in distinct:
                self._policy.touch(layer, expert, 1.0 if scores is None else scores.get(expert, 0.0))
            wanted = [expert for expert in distinct if expert not in elsewhere]
            stream = self._stream = ExpertStream(self, layer, self._policy.load_order(layer, wanted), stop)
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
        with self.lock:
            self._policy.reject(layer, wanted, kept)

    @contextmanager
    def lend(self, layer: int, experts: Iterable[int]) -> Iterator[dict[int, Lease]]:
        """Those of `experts` that are resident now, kept until the block ends. For a draft that takes what is there.

        It is no request: nothing is loaded or waited for, and neither the policy nor the counts hear of it.
        """
        with self.lock:
            found = [(expert, self.find(layer, expert)) for expert in experts]
            # What a stream has pinned is its own to release.
            lent = {expert: slot for expert, slot in found if slot is not None and slot.evictable}
            for slot in lent.values():
                slot.pinned = True
        try:
            yield {expert: Lease(expert, slot.gate_up, slot.down) for expert, slot in lent.items()}
        finally:
            with self.lock:
                for slot in lent.values():
                    slot.pinned = False
                self.trim(layer)

    # Looking ahead.

    def has(self, layer: int, expert: int) -> bool:
        """Whether it is resident or on its way."""
        with self.lock:
            return expert in self._shelves[layer].by_expert

    def prefetch(self, layer: int, expert: int, deadline: int, keep: Collection[int] = ()) -> bool:
        """Start to fetch `expert` ahead of its request, if a slot can be had; says whether it did.

        Never evicts an expert that is leased or that the plan wants, nor one of the layer's that are in `keep`.
        Prefetches go by `deadline`, earliest first.
        """
        with self.lock:
            if expert in self._shelves[layer].by_expert:
                return False
            slot = self._acquire(layer, {*self._planned(layer), *keep})
            if slot is None:
                return False
            self._policy.admit(layer, expert)
            self._load(layer, expert, slot, "prefetch", deadline)
            self.ledger.stats.prefetched += 1
            return True

    def approach(self, layer: int) -> None:
        """The decoder comes to `layer`: the one behind it is needed last, and lends its spare slots first."""
        with self.lock:
            self._shelves.at = layer

    def set_streaming(self, streaming: bool) -> None:
        """Whether whole layers stream through, which takes fewer spare slots."""
        with self.lock:
            if streaming != self._streaming:
                self._streaming = streaming
                self._share_out()
                self.lock.notify_all()

    def plan(self, wanted: Plan | None) -> None:
        """What the next verification wants, per layer: expert → gate weight. May still grow; None forgets it."""
        with self.lock:
            self._plan = wanted
            self._shelves.at = 0
            self._policy.set_plan(wanted)

    def cancel_unplanned(self) -> int:
        """Cancel the prefetches on their way that the plan does not want; says how many."""
        with self.lock:
            return self._cancel(
                (layer, slot)
                for layer, shelf in enumerate(self._shelves)
                for slot in shelf.slots
                if slot.expert not in self._planned(layer)
            )

    def cancel_prefetches(self) -> int:
        """Cancel all prefetches on their way but those that a stream waits for; says how many."""
        with self.lock:
            return self._cancel((layer, slot) for layer, shelf in enumerate(self._shelves) for slot in shelf.slots)

    @property
    def prefetching(self) -> int:
        """Prefetches on their way."""
        return len(self._prefetching)

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
        with self.lock:
            return self._slot_nbytes * sum(len(shelf.slots) for shelf in self._shelves)

    @property
    def capacity_nbytes(self) -> int:
        """Bytes of all slots that may be allocated."""
        return self._slot_nbytes * self.total_slots

    def resize(self, slots_per_layer: int) -> None:
        """Another number of slots a layer, at once; leased ones in excess go when they are released."""
        with self.lock:
            self._capacity = self._checked(slots_per_layer)
            self._share_out()
            self.lock.notify_all()

    def set_policy(self, name: str) -> None:
        """Another eviction policy, which starts to learn now. Raises UsageError for an unknown name."""
        policy = create_policy(name)
        with self.lock:
            policy.set_plan(self._plan)
            self._policy = policy
            self._share_out()
            self.lock.notify_all()

    def settle(self) -> None:
        """The run is over: close its stream, cancel its prefetches, and call what was never used wasted.

        Experts stay resident.
        """
        with self.lock:
            self._close_stream()
            self.plan(None)
            self.cancel_prefetches()
            if not self.lock.wait_for(lambda: not self._in_flight(), self.timeout_s):
                self.link.expire(self._in_flight(), self.timeout_s)
            for shelf in self._shelves:
                for slot in shelf.slots:
                    self.ledger.settle_unused(slot, "wasted")

    def reset(self) -> None:
        """Empty the cache and its counts, so that contenders start alike; keeps the policy's kind."""
        with self.lock:
            self.settle()
            for shelf in self._shelves:
                for slot in list(shelf.slots):
                    shelf.clear(slot)
            self._policy = type(self._policy)()
            self.ledger.clear()

    def close(self) -> None:
        """Settle and free all slots. The link stays open: it belongs to the caller."""
        with self.lock:
            self.settle()
            for layer, shelf in enumerate(self._shelves):
                for slot in list(shelf.slots):
                    self._shelves.drop(layer, slot)

    # What it knows.

    @property
    def stats(self) -> CacheStats:
        """A copy of the totals."""
        with self.lock:
            return dataclasses.replace(self.ledger.stats)

    def take_round(self) -> RoundCounts:
        """Counts since the last call, which start again from zero."""
        with self.lock:
            return self.ledger.take_round()

    def resident(self) -> list[list[int]]:
        """The resident experts of each layer."""
        with self.lock:
            return [shelf.resident() for shelf in self._shelves]

    # For the stream; called with the lock held.

    def find(self, layer: int, expert: int) -> Slot | None:
        """The slot that holds or awaits `expert`."""
        return self._shelves[layer].by_expert.get(expert)

    def has_free_slot(self, layer: int) -> bool:
        """Whether an expert could be loaded without evicting another."""
        return self._shelves.has_free(layer)

    def demand(self, layer: int, expert: int, wanted: int) -> Slot | None:
        """Load `expert` now; None when no slot can be had yet. `wanted` slots are asked for, this one included."""
        slot = self._acquire(layer)
        if slot is None:
            self._make_room(layer, wanted)
            slot = self._acquire(layer)
        if slot is not None:
            self._load(layer, expert, slot, "demand", 0)
        return slot

    def cancel_slot(self, layer: int, slot: Slot) -> bool:
        """Stop loading `slot`; it drains before it is used again."""
        transfer = slot.transfer
        if transfer is None or not self.link.cancel(transfer):
            return False
        self._prefetching.discard(transfer.id)
        if slot.transfer is transfer:
            self._shelves[layer].clear(slot)
        return True

    def trim(self, layer: int) -> None:
        """Give back slots in excess of the capacity, as far as nobody needs them."""
        shelf = self._shelves[layer]
        while self._shelves.excess(layer):
            free = shelf.free_slot() or self._evict(layer)
            if free is None:
                break
            self._shelves.drop(layer, free)
        excess = self._shelves.excess(layer) - sum(slot.draining for slot in shelf.slots)
        if excess > 0:
            self._cancel([(layer, slot) for slot in shelf.slots if slot.cancellable][:excess])

    def stream_closed(self, stream: ExpertStream) -> None:
        """`stream` holds nothing any more."""
        self.trim(stream.layer)
        if self._stream is stream:
            self._stream = None

    # Slots.

    def _checked(self, slots_per_layer: int) -> int:
        if slots_per_layer < 1:
            raise BudgetError("the expert cache needs at least 1 slot a layer: allow it more memory")
        return min(slots_per_layer, self.table.experts)

    def _share_out(self) -> None:
        self._shelves.share_out(self.total_slots, self._spare())
        for layer in range(self.table.layers):
            self.trim(layer)

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
        if not self._policy.lends:
            return 0
        return total - layers * max(1, self._capacity - 1)

    def _planned(self, layer: int) -> Mapping[int, float]:
        return self._plan[layer] if self._plan else {}

    def _acquire(self, layer: int, keep: Collection[int] = ()) -> Slot | None:
        """A free slot: by eviction of any expert of the layer not in `keep` if need be, or else lent by another."""
        if (slot := self._shelves.take_free(layer)) is not None:
            return slot
        if self._shelves.excess(layer):
            return None
        return self._evict(layer, keep) or self._borrow(layer)

    def _borrow(self, layer: int) -> Slot | None:
        """A spare slot of a layer that is needed later, if it holds nothing that the plan still wants there."""
        for lender in self._shelves.lenders(layer):
            keep = () if self._shelves.behind(lender) else self._planned(lender)
            slot = self._shelves[lender].free_slot() or self._evict(lender, keep)
            if slot is not None:
                return self._shelves.lend(slot, lender, layer)
        return None

    def _evict(self, layer: int, keep: Collection[int] = ()) -> Slot | None:
        shelf = self._shelves[layer]
        candidates = [expert for expert in shelf.evictable() if expert not in keep]
        if not candidates:
            return None
        expert = self._policy.victim(layer, candidates)
        slot = shelf.by_expert[expert]
        self.ledger.evicted(layer, expert, slot)
        shelf.clear(slot)
        return slot

    def _make_room(self, layer: int, wanted: int) -> None:
        """Demands need `wanted` slots: cancel prefetches of the layer that this call does not ask for."""
        slots = self._shelves[layer].slots
        planned = self._planned(layer)
        victims = sorted((s for s in slots if s.cancellable), key=lambda slot: slot.expert in planned)
        draining = sum(slot.draining for slot in slots)
        self._cancel([(layer, slot) for slot in victims[: max(0, wanted - draining)]])

    def _cancel(self, slots: Iterable[tuple[int, Slot]]) -> int:
        return sum(self.cancel_slot(layer, slot) for layer, slot in list(slots) if slot.cancellable)

    def _load(self, layer: int, expert: int, slot: Slot, cause: str, deadline: int) -> None:
        self._shelves[layer].put(expert, slot)
        on_done = functools.partial(self._ended, layer, slot)
        try:
            # The lock is held: a transfer that ends at once waits in `_ended` until the slot knows it.
            slot.transfer = self.link.submit(layer, expert, slot.flat, cause=cause, deadline=deadline, on_done=on_done)
        except BaseException:
            self._shelves[layer].clear(slot)
            raise
        if cause == "prefetch":
            self._prefetching.add(slot.transfer.id)

    def _ended(self, layer: int, slot: Slot, transfer: Transfer) -> None:
        """The link is done with `transfer`; called in whatever thread it ended."""
        with self.lock:
            shelf = self._shelves[layer]
            awaited = slot.pinned
            self.ledger.ended(slot, transfer)
            slot.transfer, slot.late = None, False
            self._prefetching.discard(transfer.id)
            if transfer.abandoned:
                self._shelves.drop(layer, slot)
            elif transfer.state != DONE:
                shelf.clear(slot)
            if awaited and self._stream is not None:
                self._stream.arrived(slot, transfer)
            self.trim(layer)
            self.lock.notify_all()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _in_flight(self) -> list[Transfer]:
        return [slot.transfer for shelf in self._shelves for slot in shelf.slots if slot.transfer is not None]
