"""Fast memory for experts: slots of one size, and the shelf of them that each layer has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import BudgetError, one_line
from engine.kernels.pages import allocate
from engine.model.layout import ExpertShape
from engine.offload.source import PAGE
from engine.offload.transfer import Transfer


@dataclass(eq=False)
class Slot:
    """Room for one expert: `flat` holds it, `gate_up` and `down` are views of that.

    free: no expert, no transfer. loading: both. ready: an expert only. draining: a transfer only, which was
    cancelled and may still write until its link is done with it.
    """

    flat: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    expert: int | None = None
    transfer: Transfer | None = None
    #: The open stream wants it: it must not be evicted.
    pinned: bool = False
    #: Its prefetch was still moving when the expert was requested.
    late: bool = False
    #: Id of the completed prefetch that brought the expert, until it is used or wasted.
    unused_prefetch: int | None = None

    @classmethod
    def allocate(cls, shape: ExpertShape, dtype: torch.dtype, device: torch.device) -> Slot:
        """A slot on `device`. In main memory it has pages of its own, which go back to the system with the last
        reference. Raises BudgetError.
        """
        try:
            if device.type == "cpu":
                flat = allocate((shape.numel,), dtype)
            else:
                flat = torch.empty(shape.numel, dtype=dtype, device=device)
        except (OSError, MemoryError, RuntimeError) as error:
            raise BudgetError(
                f"no memory for another expert slot of {shape.numel * dtype.itemsize / 2**20:.1f} MiB "
                f"({one_line(error)}): use a smaller --cache, or end other programs"
            ) from error
        return cls(flat, *shape.views(flat))

    @property
    def free(self) -> bool:
        return self.expert is None and self.transfer is None

    @property
    def ready(self) -> bool:
        return self.expert is not None and self.transfer is None

    @property
    def draining(self) -> bool:
        return self.expert is None and self.transfer is not None

    @property
    def evictable(self) -> bool:
        return self.ready and not self.pinned

    @property
    def cancellable(self) -> bool:
        """A prefetch on its way that no stream waits for."""
        return self.expert is not None and self.transfer is not None and not self.pinned


class Shelf:
    """The slots of one layer and which expert is where.

    `capacity` slots are the layer's own. It may have more: spare ones that it was lent, and for a while those that
    a shrinking capacity has not taken yet.
    """

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, capacity: int, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self.capacity = capacity
        self.slots: list[Slot] = []
        self.by_expert: dict[int, Slot] = {}

    @property
    def lent(self) -> int:
        """Slots beyond the layer's own."""
        return max(0, len(self.slots) - self.capacity)

    def free_slot(self) -> Slot | None:
        """One that is here and free."""
        return next((slot for slot in self.slots if slot.free), None)

    def allocate(self) -> Slot:
        """A new slot."""
        self.slots.append(Slot.allocate(self._shape, self._dtype, self._device))
        return self.slots[-1]

    def put(self, expert: int, slot: Slot) -> None:
        """`slot` is `expert`'s from now on."""
        slot.expert = expert
        self.by_expert[expert] = slot

    def clear(self, slot: Slot) -> None:
        """`slot` belongs to no expert any more."""
        if slot.expert is not None:
            del self.by_expert[slot.expert]
        slot.expert = None
        slot.pinned = slot.late = False

    def drop(self, slot: Slot) -> None:
        """Give the memory of `slot` back."""
        self.clear(slot)
        self.slots.remove(slot)

    def evictable(self) -> list[int]:
        """Experts that may be evicted now."""
        return [expert for expert, slot in self.by_expert.items() if slot.evictable]

    def resident(self) -> list[int]:
        """Experts that are here in full."""
        return sorted(expert for expert, slot in self.by_expert.items() if slot.ready)


def slot_nbytes(shape: ExpertShape, dtype: torch.dtype) -> int:
    """Bytes of one slot: an expert in `dtype`, up to the next page."""
    return -(-shape.numel * dtype.itemsize // PAGE) * PAGE
