"""The draft's experts of one layer, always resident: in the form that the kernel reads, or torch's."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from engine.kernels.experts import quantized_moe
from engine.kernels.pages import allocate
from engine.model.ffn import apply_expert
from engine.model.layout import ExpertShape
from engine.model.seams import ExpertsModule
from engine.offload.groups import RowGroups
from engine.offload.quantize import GROUP, QuantizedExpert, QuantizedMatrix, quantize_expert, quantize_planes


class DraftLayer(ABC):
    """A quantized copy of all experts of one layer (MoE-SpeQ, section 3.4). Filled once, expert by expert."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    @abstractmethod
    def put(self, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """Quantize `expert`, the next one: gate_up `(2I, H)` and down `(H, I)`."""

    @abstractmethod
    def run(
        self, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H)."""


class TorchDraftLayer(DraftLayer):
    """Expert by expert, with torch's operators."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._experts: list[QuantizedExpert] = []

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self._experts)

    def put(self, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        assert expert == len(self._experts), "experts are put in order"
        self._experts.append(quantize_expert(gate_up, down, self._bits))

    def run(
        self, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        groups = RowGroups(hidden, index.tolist())
        for expert in groups.members:
            copy, x = self._experts[expert], groups.input(expert)
            groups.put(expert, apply_expert(module, expert, x, copy.gate_up, copy.down, _linear))
        return groups.combine(weights)


class KernelDraftLayer(DraftLayer):
    """All experts in one piece of memory, computed by one call of the compiled kernel."""

    def __init__(self, experts: int, shape: ExpertShape, bits: int, activation: str) -> None:
        self._bits = bits
        self._activation = activation
        self._gate_up = _room(experts, shape.gate_up, bits)
        self._down = _room(experts, shape.down, bits)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._gate_up, *self._down))

    def put(self, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        for (codes, scales), matrix in ((self._gate_up, gate_up), (self._down, down)):
            codes[expert], scales[expert] = quantize_planes(matrix, self._bits).packed()

    def run(
        self, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return quantized_moe(hidden, self._gate_up, self._down, index, weights, self._bits, self._activation)


def _linear(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    out = matrix.linear(x)
    return out if bias is None else out + bias


def _room(experts: int, shape: tuple[int, int], bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of matrices `shape` (out, in), as `quantized_moe` takes them."""
    rows, groups = shape[0], -(-shape[1] // GROUP)
    codes = allocate((experts, rows, groups, GROUP * bits // 8), torch.uint8)
    return codes, allocate((experts, rows, groups, 2), torch.bfloat16)
