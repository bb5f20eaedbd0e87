"""Computing the routed experts of one layer: the offloaded originals through the cache, or the resident draft copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.errors import Cancelled
from engine.model.seams import ExpertsModule
from engine.offload.cache import ExpertCache
from engine.offload.draft_layer import DraftLayer
from engine.offload.groups import KernelRowGroups, RowGroups
from engine.offload.in_place import InPlace


class LayerObserver(Protocol):
    """Hears of every MoE layer that is about to be computed, in order, inside a forward pass."""

    def routed(self, layer: int, index: list[list[int]], weights: list[list[float]], hidden: torch.Tensor) -> None:
        """The router chose `index` (rows, top_k) with `weights` for `hidden` (rows, H)."""

    def computed(self, layer: int, rows: int) -> None:
        """The layer's experts are done."""


class OffloadedExperts:
    """The target's experts, leased from the cache layer by layer, computed by the kernels where `native`.

    With `in_place` missed experts may be computed where they lie, while others are on their way.
    """

    def __init__(
        self, cache: ExpertCache, observer: LayerObserver, native: bool, in_place: InPlace | None = None
    ) -> None:
        self._cache = cache
        self._in_place = in_place
        self._observer = observer
        self._groups = KernelRowGroups if native else RowGroups
        self.stop: threading.Event | None = None

    def run(
        self, layer: int, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H). Raises Cancelled, TransferError."""
        if self.stop is not None and self.stop.is_set():
            raise Cancelled("stopped")
        routes, gates = index.tolist(), weights.tolist()
        self._observer.routed(layer, routes, gates, hidden)
        groups = self._groups(hidden, routes)
        elsewhere: list[int] = []
        if self._in_place is not None:
            absent = [expert for expert in groups.members if not self._cache.has(layer, expert)]
            elsewhere = self._in_place.choose({expert: len(groups.members[expert][0]) for expert in absent})
        scores = gate_scores(routes, gates)
        with self._cache.stream(layer, list(groups.members), scores, elsewhere=elsewhere, stop=self.stop) as leases:
            if self._in_place is not None and elsewhere:
                self._in_place.compute(layer, module, groups, elsewhere)
            for lease in leases:
                groups.compute(module, [lease, *leases.take_ready()])
        out = groups.combine(weights)
        self._observer.computed(layer, len(routes))
        return out


class QuantizedExperts:
    """The draft's experts: a quantized copy of all of them, always resident (MoE-SpeQ, section 3.4)."""

    def __init__(self, layers: Sequence[DraftLayer], observer: LayerObserver) -> None:
        self._layers = layers
        self._observer = observer
        self.stop: threading.Event | None = None
        self.nbytes = sum(layer.nbytes for layer in layers)

    def run(
        self, layer: int, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H). Raises Cancelled."""
        if self.stop is not None and self.stop.is_set():
            raise Cancelled("stopped")
        self._observer.routed(layer, index.tolist(), weights.tolist(), hidden)
        out = self._layers[layer].run(module, hidden, index, weights)
        self._observer.computed(layer, len(index))
        return out


def gate_scores(routes: list[list[int]], gates: list[list[float]]) -> dict[int, float]:
    """Each routed expert's gate weight, summed over the rows."""
    scores: dict[int, float] = {}
    for experts, values in zip(routes, gates, strict=True):
        for expert, value in zip(experts, values, strict=True):
            scores[expert] = scores.get(expert, 0.0) + value
    return scores
