"""One layer's experts, leased one after the other: resident ones first, the others as they arrive."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.errors import BudgetError, Cancelled, TransferError
from engine.offload.links import STOP_POLL_S
from engine.offload.slot_pool import SlotPool
from engine.offload.slots import Slot
from engine.offload.transfer import DONE, Transfer


@dataclass(frozen=True)
class Lease:
    """An expert's weights, gate_up `(2I, H)` and down `(H, I)`: good until the stream advances or closes."""

    expert: int
    gate_up: torch.Tensor
    down: torch.Tensor


class ExpertStream(Iterator[Lease]):
    """Yields each requested expert once (see `ExpertCache.stream`).

    An expert is in one of four places: `_missing` (no slot yet), `_loading`, `_ready`, or `_leased`. Its slot is
    pinned from the request, or from the moment it gets one, until its lease is released, so no wave evicts what a
    later one of the same call wants. All of it is guarded by the pool's lock.
    """

    def __init__(self, pool: SlotPool, layer: int, experts: list[int], stop: threading.Event | None) -> None:
        self.layer = layer
        self._pool = pool
        self._stop = stop
        self._missing = deque(experts)
        self._loading: dict[int, Slot] = {}
        self._ready: deque[Slot] = deque()
        self._leased: list[Slot] = []
        self._error: Exception | None = None
        self._cut_short = False

    def __iter__(self) -> ExpertStream:
        return self

    def __enter__(self) -> ExpertStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __next__(self) -> Lease:
        with self._pool.lock:
            if self._cut_short:
                # To end quietly would leave experts out of the sum.
                raise RuntimeError("this stream of experts was closed before it had yielded all of them")
            try:
                self._release()
                self._advance()
                if not self._ready:
                    self._stall()
            except BaseException:
                self.close()
                raise
            if not self._ready:
                self.close()
                raise StopIteration
            return self._lease()

    def take_ready(self) -> list[Lease]:
        """More leases, which end with the last one that was yielded: all that are ready, for one call to compute.

        None while an expert waits for a slot: it should get the first that comes free.
        """
        with self._pool.lock:
            return [] if self._missing else [self._lease() for _ in range(len(self._ready))]

    def close(self) -> None:
        """Release the lease and give up what has not been yielded; harmless when done already."""
        with self._pool.lock:
            self._release()
            self._cut_short = self._cut_short or bool(self._missing or self._loading or self._ready)
            self._missing.clear()
            for slot in [*self._ready, *self._loading.values()]:
                slot.pinned = False
            self._ready.clear()
            loading, self._loading = list(self._loading.values()), {}
            for slot in loading:
                self._pool.cancel_slot(self.layer, slot)
            self._pool.trim(self.layer)
            if self._pool.waiter is self:
                self._pool.waiter = None

    def adopt_present(self) -> tuple[int, int]:
        """Take what is resident or on its way, before anything of it can be evicted; counts (hits, late)."""
        hits = late = 0
        for expert in list(self._missing):
            slot = self._pool.find(self.layer, expert)
            if slot is not None:
                hits += slot.ready
                late += not slot.ready
                self._adopt(slot)
                self._missing.remove(expert)
        return hits, late

    def request(self) -> None:
        """Demand missing experts: into free slots all of them, by eviction only what keeps the link busy.

        An eviction that can wait may find a worse expert to evict, among those that arrive meanwhile.
        """
        while self._missing:
            expert = self._missing[0]
            if len(self._loading) >= self._pool.link.depth and not self._pool.shelves.has_free(self.layer):
                return
            # Somebody may have prefetched it since.
            slot = self._pool.find(self.layer, expert)
            if slot is None:
                slot = self._pool.demand(self.layer, expert, len(self._missing))
                if slot is None:
                    return
                slot.pinned = True
                self._loading[expert] = slot
            else:
                self._adopt(slot)
            self._missing.popleft()

    def arrived(self, slot: Slot, transfer: Transfer) -> None:
        """A transfer into a pinned slot ended."""
        self._loading.pop(transfer.expert, None)
        if transfer.state == DONE:
            self._ready.append(slot)
        else:
            self._error = transfer.error or TransferError("the link was closed while experts were on their way")

    def _lease(self) -> Lease:
        slot = self._ready.popleft()
        self._leased.append(slot)
        assert slot.expert is not None
        return Lease(slot.expert, slot.gate_up, slot.down)

    def _adopt(self, slot: Slot) -> None:
        """Pin a slot that has the expert, or will have it soon."""
        slot.pinned = True
        if slot.ready:
            self._pool.ledger.settle_unused(slot, "used")
            self._ready.append(slot)
        else:
            assert slot.expert is not None and slot.transfer is not None
            slot.late = True
            self._pool.link.promote(slot.transfer)
            self._loading[slot.expert] = slot

    def _release(self) -> None:
        if self._leased:
            for slot in self._leased:
                slot.pinned = False
            self._leased.clear()
            self._pool.trim(self.layer)

    def _advance(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise Cancelled("stopped while computing experts")
        if self._error:
            raise self._error
        self._pool.link.check()
        self.request()

    def _stall(self) -> None:
        """Wait for the next expert; none left is no reason to."""
        if not (self._missing or self._loading):
            return
        start_ns = time.perf_counter_ns()
        seen, since = -1, time.monotonic()
        try:
            while not self._ready and (self._missing or self._loading):
                progress = sum(slot.transfer.bytes_moved for slot in self._loading.values() if slot.transfer)
                if progress != seen:
                    seen, since = progress, time.monotonic()
                elif time.monotonic() - since > self._pool.timeout_s:
                    self._give_up()
                self._pool.lock.wait(STOP_POLL_S)
                self._advance()
        finally:
            self._pool.ledger.observer.stall(self.layer, start_ns, time.perf_counter_ns())

    def _give_up(self) -> None:
        transfers = [slot.transfer for slot in self._loading.values() if slot.transfer]
        self._pool.link.expire(transfers, self._pool.timeout_s)
        if not transfers:
            raise BudgetError(f"no slot of layer {self.layer} came free for expert {self._missing[0]}")
