"""Where the bytes of each expert lie and what they mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Segment:
    """`nbytes` bytes of `path`, from `offset` on."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertShape:
    """The tensors of one expert in the order in which they lie in a slot: gate_up (2I, H), then down (H, I).

    `dtype` is the one on disk; `nbytes` counts that. All routed experts of a model share one shape.
    """

    hidden: int
    intermediate: int
    dtype: torch.dtype

    @property
    def gate_up(self) -> tuple[int, int]:
        return (2 * self.intermediate, self.hidden)

    @property
    def down(self) -> tuple[int, int]:
        return (self.hidden, self.intermediate)

    @property
    def numel(self) -> int:
        return math.prod(self.gate_up) + math.prod(self.down)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A flat `(numel,)` tensor of any dtype as its (gate_up, down) views."""
        split = math.prod(self.gate_up)
        return flat[:split].view(self.gate_up), flat[split : self.numel].view(self.down)


@dataclass(frozen=True)
class ExpertRecord:
    """One routed expert: `segments` concatenated are its bytes in slot order (gate, up, down)."""

    layer: int
    expert: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ExpertTable:
    """All routed experts of a checkpoint. `records[layer][expert]`; `layer` counts MoE layers."""

    shape: ExpertShape
    records: tuple[tuple[ExpertRecord, ...], ...]

    @property
    def layers(self) -> int:
        return len(self.records)

    @property
    def experts(self) -> int:
        return len(self.records[0])
