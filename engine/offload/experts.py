"""Computing the routed experts of one layer: the offloaded originals through the cache, or the resident draft copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.errors import Cancelled
from engine.model.seams import ExpertsModule
from engine.offload.cache import ExpertCache
from engine.offload.quantize import QuantizedExpert


class LayerObserver(Protocol):
    """Hears of every MoE layer that is about to be computed, in order, inside a forward pass."""

    def routed(self, layer: int, index: list[list[int]], weights: list[list[float]], hidden: torch.Tensor) -> None:
        """The router chose `index` (rows, top_k) with `weights` for `hidden` (rows, H)."""

    def computed(self, layer: int, rows: int) -> None:
        """The layer's experts are done."""


class _Groups:
    """The rows of each expert, and the buffer in which their outputs wait to be summed in a fixed order."""

    def __init__(self, hidden: torch.Tensor, index: list[list[int]]) -> None:
        self.hidden = hidden
        self.members: dict[int, tuple[list[int], list[int]]] = {}
        for row, experts in enumerate(index):
            for position, expert in enumerate(experts):
                rows, positions = self.members.setdefault(expert, ([], []))
                rows.append(row)
                positions.append(position)
        self._outputs = hidden.new_empty(len(index), len(index[0]), hidden.shape[1])

    def input(self, expert: int) -> torch.Tensor:
        """The rows routed to `expert`: (its rows, H)."""
        rows, _ = self.members[expert]
        return self.hidden if len(rows) == len(self.hidden) else self.hidden[rows]

    def put(self, expert: int, output: torch.Tensor) -> None:
        """What `expert` made of its rows."""
        rows, positions = self.members[expert]
        if len(rows) == 1:
            self._outputs[rows[0], positions[0]] = output[0]
        else:
            self._outputs[rows, positions] = output

    def combine(self, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum over the top-k positions: the same order whatever order the experts arrived in."""
        return (self._outputs * weights.to(self._outputs.dtype).unsqueeze(-1)).sum(1)


class OffloadedExperts:
    """The target's experts, leased from the cache layer by layer."""

    def __init__(self, cache: ExpertCache, observer: LayerObserver) -> None:
        self._cache = cache
        self._observer = observer
        self.stop: threading.Event | None = None

    def run(
        self, layer: int, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H). Raises Cancelled, TransferError."""
        if self.stop is not None and self.stop.is_set():
            raise Cancelled("stopped")
        routes, gates = index.tolist(), weights.tolist()
        self._observer.routed(layer, routes, gates, hidden)
        groups = _Groups(hidden, routes)
        with self._cache.stream(layer, list(groups.members), gate_scores(routes, gates), stop=self.stop) as leases:
            for lease in leases:
                x = groups.input(lease.expert)
                groups.put(lease.expert, F.linear(module._apply_gate(F.linear(x, lease.gate_up)), lease.down))
        out = groups.combine(weights)
        self._observer.computed(layer, len(routes))
        return out


class QuantizedExperts:
    """The draft's experts: a quantized copy of all of them, always resident (MoE-SpeQ, section 3.4)."""

    def __init__(self, experts: Sequence[Sequence[QuantizedExpert]], observer: LayerObserver) -> None:
        self._experts = experts
        self._observer = observer
        self.stop: threading.Event | None = None
        self.nbytes = sum(expert.nbytes for layer in experts for expert in layer)

    def run(
        self, layer: int, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H). Raises Cancelled."""
        if self.stop is not None and self.stop.is_set():
            raise Cancelled("stopped")
        routes = index.tolist()
        self._observer.routed(layer, routes, weights.tolist(), hidden)
        groups = _Groups(hidden, routes)
        for expert in groups.members:
            copy, x = self._experts[layer][expert], groups.input(expert)
            groups.put(expert, copy.down.linear(module._apply_gate(copy.gate_up.linear(x))))
        out = groups.combine(weights)
        self._observer.computed(layer, len(routes))
        return out


def gate_scores(routes: list[list[int]], gates: list[list[float]]) -> dict[int, float]:
    """Each routed expert's gate weight, summed over the rows."""
    scores: dict[int, float] = {}
    for experts, values in zip(routes, gates, strict=True):
        for expert, value in zip(experts, values, strict=True):
            scores[expert] = scores.get(expert, 0.0) + value
    return scores
