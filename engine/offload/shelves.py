"""The slots of all layers: most belong to one layer, the spare ones go to whichever needs them next."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.model.device import CPU
from engine.model.layout import ExpertShape
from engine.offload.slots import Shelf, Slot


class Shelves:
    """A shelf a layer, with slots of its own, and spare ones that any of them may be lent.

    A decoder walks its layers in a circle: `at` is the layer it has come to, and the layer behind it is needed
    last. So a spare slot moves on with the decoder, and a draft that runs before the first layer finds them all to
    fill for the first layers. Guarded by the cache's lock.
    """

    def __init__(self, shape: ExpertShape, dtype: torch.dtype, layers: int, device: torch.device = CPU) -> None:
        self._shelves = [Shelf(shape, dtype, 0, device) for _ in range(layers)]
        self._spare = 0
        # Spare slots in use: counted as they come and go, because every request of every layer asks.
        self._lent = 0
        self.at = 0

    def __getitem__(self, layer: int) -> Shelf:
        return self._shelves[layer]

    def __iter__(self) -> Iterator[Shelf]:
        return iter(self._shelves)

    def share_out(self, slots: int, spare: int) -> None:
        """`slots` in all, `spare` of them to lend. Each layer owns as many of the others, the first ones one more.

        What is in excess of the new numbers stays until it is dropped.
        """
        self._spare = spare
        own, rest = divmod(slots - spare, len(self._shelves))
        for layer, shelf in enumerate(self._shelves):
            shelf.capacity = own + (layer < rest)
        self._lent = sum(shelf.lent for shelf in self._shelves)

    def has_free(self, layer: int) -> bool:
        """Whether `take_free` would give a slot."""
        return self._shelves[layer].free_slot() is not None or self._may_allocate(layer)

    def take_free(self, layer: int) -> Slot | None:
        """A slot of `layer` that holds nothing, allocated if there may be another."""
        shelf = self._shelves[layer]
        if (slot := shelf.free_slot()) is not None or not self._may_allocate(layer):
            return slot
        slot = shelf.allocate()
        self._lent += len(shelf.slots) > shelf.capacity
        return slot

    def drop(self, layer: int, slot: Slot) -> None:
        """Give the memory of `slot` back."""
        shelf = self._shelves[layer]
        self._lent -= shelf.lent > 0
        shelf.drop(slot)

    def excess(self, layer: int) -> int:
        """How many slots `layer` has to give back."""
        return max(0, min(self._shelves[layer].lent, self._lent - self._spare))

    def lenders(self, layer: int) -> list[int]:
        """Layers with spare slots that are needed later than `layer`, the one needed last first."""
        due = self._due(layer)
        later = [m for m, shelf in enumerate(self._shelves) if shelf.lent and self._due(m) > due]
        return sorted(later, key=self._due, reverse=True)

    def behind(self, layer: int) -> bool:
        """Whether the decoder has passed `layer`."""
        return layer < self.at

    def lend(self, slot: Slot, lender: int, layer: int) -> Slot:
        """Move a free slot."""
        giver, taker = self._shelves[lender], self._shelves[layer]
        self._lent -= giver.lent > 0
        giver.slots.remove(slot)
        taker.slots.append(slot)
        self._lent += taker.lent > 0
        return slot

    def _may_allocate(self, layer: int) -> bool:
        shelf = self._shelves[layer]
        return len(shelf.slots) < shelf.capacity or self._lent < self._spare

    def _due(self, layer: int) -> int:
        return (layer - self.at) % len(self._shelves)
