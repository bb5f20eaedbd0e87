"""Who gets which slot of the expert cache: free ones, evicted ones, borrowed ones, and the transfers that fill them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from engine.offload.links import Link
from engine.offload.policies import Plan, Policy
from engine.offload.shelves import Shelves
from engine.offload.slots import Slot
from engine.offload.stats import Ledger
from engine.offload.transfer import DONE, Transfer


class Waiter(Protocol):
    """Whoever has pinned slots that are still being filled."""

    def arrived(self, slot: Slot, transfer: Transfer) -> None:
        """The transfer into a pinned slot ended."""

    def close(self) -> None:
        """Give up what has not come."""


class SlotPool:
    """The slots of all layers, and what decides about them: the eviction policy, the plan, and who waits.

    `lock` guards everything; it is held by whoever calls a method. It is re-entrant, because a cancelled transfer may
    end inside the call that cancels it. A transfer that makes no progress for `timeout_s` seconds may be given up.
    """

    def __init__(self, shelves: Shelves, link: Link, policy: Policy, ledger: Ledger, timeout_s: float) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.shelves, self.link, self.policy, self.ledger = shelves, link, policy, ledger
        self.timeout_s = timeout_s
        #: What the next verification wants, per layer: expert → gate weight.
        self.plan: Plan | None = None
        #: Who waits for slots now.
        self.waiter: Waiter | None = None
        #: The prefetches on their way, by the transfer's id.
        self.prefetching: set[int] = set()

    def find(self, layer: int, expert: int) -> Slot | None:
        """The slot that holds or awaits `expert`."""
        return self.shelves[layer].by_expert.get(expert)

    def planned(self, layer: int) -> Mapping[int, float]:
        """What the plan wants of `layer`."""
        return self.plan[layer] if self.plan else {}

    def demand(self, layer: int, expert: int, wanted: int) -> Slot | None:
        """Load `expert` now; None when no slot can be had yet. `wanted` slots are asked for, this one included."""
        slot = self._acquire(layer)
        if slot is None:
            self._make_room(layer, wanted)
            slot = self._acquire(layer)
        if slot is not None:
            self._load(layer, expert, slot, "demand", 0)
        return slot

    def prefetch(self, layer: int, expert: int, deadline: int, keep: Collection[int]) -> bool:
        """Start to fetch `expert`, which is not there, if a slot can be had without evicting one of `keep`."""
        slot = self._acquire(layer, keep)
        if slot is None:
            return False
        self.policy.admit(layer, expert)
        self._load(layer, expert, slot, "prefetch", deadline)
        return True

    def cancel(self, slots: Iterable[tuple[int, Slot]]) -> int:
        """Stop loading those of `slots` (with their layers) that nobody waits for; says how many."""
        return sum(self.cancel_slot(layer, slot) for layer, slot in list(slots) if slot.cancellable)

    def cancel_slot(self, layer: int, slot: Slot) -> bool:
        """Stop loading `slot`; it drains before it is used again."""
        transfer = slot.transfer
        if transfer is None or not self.link.cancel(transfer):
            return False
        self.prefetching.discard(transfer.id)
        if slot.transfer is transfer:
            self.shelves[layer].clear(slot)
        return True

    def trim(self, layer: int) -> None:
        """Give back slots in excess of the capacity, as far as nobody needs them."""
        shelf = self.shelves[layer]
        while self.shelves.excess(layer):
            free = shelf.free_slot() or self._evict(layer)
            if free is None:
                break
            self.shelves.drop(layer, free)
        excess = self.shelves.excess(layer) - sum(slot.draining for slot in shelf.slots)
        if excess > 0:
            self.cancel([(layer, slot) for slot in shelf.slots if slot.cancellable][:excess])

    def in_flight(self) -> list[Transfer]:
        """All transfers that have not ended."""
        return [slot.transfer for shelf in self.shelves for slot in shelf.slots if slot.transfer is not None]

    def _acquire(self, layer: int, keep: Collection[int] = ()) -> Slot | None:
        """A free slot: by eviction of any expert of the layer not in `keep` if need be, or else lent by another."""
        if (slot := self.shelves.take_free(layer)) is not None:
            return slot
        if self.shelves.excess(layer):
            return None
        return self._evict(layer, keep) or self._borrow(layer)

    def _borrow(self, layer: int) -> Slot | None:
        """A spare slot of a layer that is needed later, if it holds nothing that the plan still wants there."""
        for lender in self.shelves.lenders(layer):
            keep = () if self.shelves.behind(lender) else self.planned(lender)
            slot = self.shelves[lender].free_slot() or self._evict(lender, keep)
            if slot is not None:
                return self.shelves.lend(slot, lender, layer)
        return None

    def _evict(self, layer: int, keep: Collection[int] = ()) -> Slot | None:
        shelf = self.shelves[layer]
        candidates = [expert for expert in shelf.evictable() if expert not in keep]
        if not candidates:
            return None
        expert = self.policy.victim(layer, candidates)
        slot = shelf.by_expert[expert]
        self.ledger.evicted(layer, expert, slot)
        shelf.clear(slot)
        return slot

    def _make_room(self, layer: int, wanted: int) -> None:
        """Demands need `wanted` slots: cancel prefetches of the layer that this call does not ask for."""
        slots = self.shelves[layer].slots
        planned = self.planned(layer)
        victims = sorted((s for s in slots if s.cancellable), key=lambda slot: slot.expert in planned)
        draining = sum(slot.draining for slot in slots)
        self.cancel([(layer, slot) for slot in victims[: max(0, wanted - draining)]])

    def _load(self, layer: int, expert: int, slot: Slot, cause: str, deadline: int) -> None:
        self.shelves[layer].put(expert, slot)
        on_done = functools.partial(self._ended, layer, slot)
        try:
            # The lock is held: a transfer that ends at once waits in `_ended` until the slot knows it.
            slot.transfer = self.link.submit(layer, expert, slot.flat, cause=cause, deadline=deadline, on_done=on_done)
        except BaseException:
            self.shelves[layer].clear(slot)
            raise
        if cause == "prefetch":
            self.prefetching.add(slot.transfer.id)

    def _ended(self, layer: int, slot: Slot, transfer: Transfer) -> None:
        """The link is done with `transfer`; called in whatever thread it ended."""
        with self.lock:
            shelf = self.shelves[layer]
            awaited = slot.pinned
            self.ledger.ended(slot, transfer)
            slot.transfer, slot.late = None, False
            self.prefetching.discard(transfer.id)
            if transfer.abandoned:
                self.shelves.drop(layer, slot)
            elif transfer.state != DONE:
                shelf.clear(slot)
            if awaited and self.waiter is not None:
                self.waiter.arrived(slot, transfer)
            self.trim(layer)
            self.lock.notify_all()
