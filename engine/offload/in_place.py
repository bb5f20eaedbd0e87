"""Missed experts that are computed by the processor where they lie, instead of being fetched."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.errors import ModelError
from engine.kernels.linear import kernel_linear
from engine.model.ffn import apply_expert
from engine.model.seams import ExpertsModule
from engine.offload.groups import RowGroups
from engine.offload.host import HostSlab
from engine.offload.host_link import HostLink
from engine.offload.stream import Lease

#: Rows at which the cost of an expert is measured while loading; a few rows cost as much as one.
FEW, MANY = 1, 16
REPEATS = 5
#: How fast the estimate follows what computing really took: the processor may have other work.
WEIGHT = 0.1


class InPlace:
    """Chooses and computes. `misses` is one of `engine.config.MISSES`; `native` computes by the compiled kernels.

    A fetch occupies the link, a computation the processor, and both go on at the same time. So the experts of a layer
    are dealt out one by one to whichever would be done with it first, by the measured cost of each.
    """

    def __init__(self, link: HostLink, module: Any, misses: str, native: bool) -> None:
        """Measures what an expert like those of `module` costs. Raises ModelError if `misses` cannot be had."""
        self._slab: HostSlab = link.source
        self._link = link
        self._linear = kernel_linear if native else F.linear
        self._forced = misses == "compute"
        # Biases and norms of a model on a device lie there too.
        self.possible = misses != "fetch" and not (
            link.device.type != "cpu" and (module.has_bias or module.has_post_expert_norm)
        )
        if self._forced and not self.possible:
            raise ModelError("experts with biases or norms of their own cannot be computed beside the device: "
                             "use --misses fetch")  # fmt: skip
        self._few, self._many = (self._measure(module, rows) for rows in (FEW, MANY)) if self.possible else (0.0, 0.0)
        self._slowdown = 1.0

    def seconds(self, rows: int) -> float:
        """What an expert costs the processor for so many rows."""
        slope = max(0.0, self._many - self._few) / (MANY - FEW)
        return self._slowdown * (self._few + slope * (rows - FEW))

    def choose(self, missing: Mapping[int, int]) -> list[int]:
        """Those of the missing experts (expert → its rows) to compute where they lie."""
        if not self.possible or self._forced:
            return list(missing) if self._forced else []
        fetch = self._slab.expert_nbytes / self._link.bytes_per_s
        fetching = computing = 0.0
        chosen = []
        for expert in sorted(missing, key=lambda expert: missing[expert]):
            compute = self.seconds(missing[expert])
            if computing + compute <= fetching + fetch:
                computing += compute
                chosen.append(expert)
            else:
                fetching += fetch
        return chosen

    def compute(self, layer: int, module: ExpertsModule, groups: RowGroups, experts: Sequence[int]) -> None:
        """Run `experts` on their rows of `groups`: on the CPU exactly as if they had been leased."""
        expected = sum(self.seconds(len(groups.members[expert][0])) for expert in experts) / self._slowdown
        begin = time.perf_counter()
        if groups.hidden.device.type == "cpu":
            groups.compute(module, [Lease(expert, *self._slab.weights(layer, expert)) for expert in experts])
        else:
            for expert in experts:
                out = self._apply(module, layer, expert, groups.input(expert).cpu())
                groups.put(expert, out.to(groups.hidden.device))
        self._slowdown += WEIGHT * ((time.perf_counter() - begin) / expected - self._slowdown)

    def _apply(self, module: ExpertsModule, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        return apply_expert(module, expert, x, *self._slab.weights(layer, expert), self._linear)

    @torch.no_grad()
    def _measure(self, module: ExpertsModule, rows: int) -> float:
        """Seconds for one expert, the median of a few that are not in the processor's caches."""
        table = self._slab.table
        x = torch.ones(rows, table.shape.hidden, dtype=self._slab.dtype)
        taken = []
        for repeat in range(REPEATS):
            begin = time.perf_counter()
            apply_expert(module, 0, x, *self._slab.weights(repeat % table.layers, repeat % table.experts), self._linear)
            taken.append(time.perf_counter() - begin)
        return sorted(taken)[REPEATS // 2]
