"""Where the bytes of each expert lie and what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.model import mxfp4


@dataclass(frozen=True)
class Segment:
    """`nbytes` bytes of `path`, from `offset` on."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ExpertShape:
    """The matrices of one expert in the order in which they lie in a slot: gate_up (2I, H), then down (H, I).

    Experts without a gate have (I, H) in the place of gate_up. With `transposed` the bytes are those of the transposed
    matrices, as some checkpoints store them; the pack turns them. With `mxfp4` they are quantized on disk, each as its
    blocks and scales; the pack holds them in `dtype`, which else is the one on disk. `nbytes` counts stored bytes.
    All routed experts of a model share one shape. Biases are not part of it (see `engine/model/ffn.py`).
    """

    hidden: int
    intermediate: int
    dtype: torch.dtype
    gated: bool = True
    transposed: bool = False
    mxfp4: bool = False

    @property
    def gate_up(self) -> tuple[int, int]:
        return (2 * self.intermediate if self.gated else self.intermediate, self.hidden)

    @property
    def down(self) -> tuple[int, int]:
        return (self.hidden, self.intermediate)

    @property
    def numel(self) -> int:
        return math.prod(self.gate_up) + math.prod(self.down)

    @property
    def nbytes(self) -> int:
        return mxfp4.nbytes(self.numel) if self.mxfp4 else self.numel * self.dtype.itemsize

    @property
    def packed(self) -> ExpertShape:
        """The same expert as the pack stores it: ready to use."""
        return replace(self, transposed=False, mxfp4=False)

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A flat `(numel,)` tensor of any dtype as its (gate_up, down) views, not contiguous if `transposed`."""
        split = math.prod(self.gate_up)
        parts = (flat[:split], self.gate_up), (flat[split : self.numel], self.down)
        if self.transposed:
            gate_up, down = (part.view(columns, rows).t() for part, (rows, columns) in parts)
        else:
            gate_up, down = (part.view(shape) for part, shape in parts)
        return gate_up, down

    def unpack(self, raw: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of an expert as they are stored, flat uint8, as [gate_up, down] in `dtype`."""
        if self.mxfp4:
            return mxfp4.decode(raw, self.gate_up, self.down)
        return list(self.views(raw.view(self.dtype)))


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

    def all(self) -> Iterator[ExpertRecord]:
        """Every expert, layer by layer."""
        return (record for layer in self.records for record in layer)
