"""Group quantization of expert matrices: the draft's copy of the experts, small enough to stay resident.

Every 32 weights along the input dimension share a scale and a zero point:

    w ≈ (code - 2^(bits - 1)) * scale + zero,    0 <= code < 2^bits

`zero` is the value of the middle code rather than of code 0 (the minimum): it lies near 0, so that rounding
it to bfloat16 costs little, and it is the form that torch's fused 4-bit product takes.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn import functional as F

GROUP = 32

#: Codes are stored as planes of bits, low bits first; 3 bits are a 2-bit plane and a 1-bit plane.
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}


class QuantizedMatrix(ABC):
    """A matrix `(out, in)` as packed codes and one bfloat16 (scale, zero) pair a group of 32 inputs.

    `scales_and_zeros` is `(groups, rows, 2)`; subclasses hold the codes in the one form that they compute with.
    """

    def __init__(self, shape: tuple[int, int], bits: int, scales_and_zeros: torch.Tensor) -> None:
        self.shape = shape
        self.bits = bits
        self.scales_and_zeros = scales_and_zeros

    @property
    @abstractmethod
    def packed_nbytes(self) -> int:
        """Bytes of the packed codes."""

    @abstractmethod
    def codes(self) -> torch.Tensor:
        """The codes, unpacked: `(out, in)` uint8."""

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales and zeros."""
        return self.packed_nbytes + self.scales_and_zeros.nbytes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix `(out, in)` that the codes stand for, computed in float32 and rounded once to `dtype`."""
        rows, columns = self.shape
        grouped = _pad_columns(self.codes()).view(rows, -1, GROUP).float()
        scale, zero = self.scales_and_zeros[:, :rows].float().permute(2, 1, 0).unsqueeze(-1)
        weights = grouped.sub_(2 ** (self.bits - 1)).mul_(scale).add_(zero)
        return weights.view(rows, -1)[:, :columns].to(dtype).contiguous()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """`x (rows, in)` times the transposed matrix: `(rows, out)` in x's dtype."""
        return F.linear(x, self.dequantize(x.dtype))


class PlaneMatrix(QuantizedMatrix):
    """Codes in bit planes; computes by dequantizing. Any shape, any number of bits."""

    def __init__(self, codes: torch.Tensor, bits: int, scales_and_zeros: torch.Tensor) -> None:
        super().__init__((codes.shape[0], codes.shape[1]), bits, scales_and_zeros)
        padded = _pad_columns(codes).view(codes.shape[0], -1, GROUP)
        self.planes: list[torch.Tensor] = []
        shift = 0
        for width in PLANES[bits]:
            self.planes.append(_pack_plane((padded >> shift) & (2**width - 1), width))
            shift += width

    @property
    def packed_nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes `(rows, groups, 4 · bits)` uint8 and scales `(rows, groups, 2)`: as csrc/quantized.h reads them."""
        return torch.cat(self.planes, dim=-1), self.scales_and_zeros.transpose(0, 1).contiguous()

    def codes(self) -> torch.Tensor:
        shift = 0
        codes: torch.Tensor | None = None
        for width, plane in zip(PLANES[self.bits], self.planes, strict=True):
            values = _unpack_plane(plane, width)
            codes = values if codes is None else codes | (values << shift)
            shift += width
        assert codes is not None
        return codes.reshape(self.shape[0], -1)[:, : self.shape[1]].contiguous()


class FusedInt4Matrix(QuantizedMatrix):
    """4-bit codes in the layout of torch's fused CPU product, which reads them without dequantizing first.

    Measured at (256, 192), one core: 5 us for 1 row and 80 us for 64, against 240 us to dequantize alone. With
    float32 activations the same operator is 20 times slower, so they are rounded to bfloat16 here.
    """

    #: The operator wants a multiple of 16 rows.
    ROWS = 16

    def __init__(self, codes: torch.Tensor, scales_and_zeros: torch.Tensor) -> None:
        rows, columns = codes.shape
        missing = -rows % self.ROWS
        super().__init__((rows, columns), 4, F.pad(scales_and_zeros, (0, 0, 0, missing)).contiguous())
        padded = F.pad(_pad_columns(codes), (0, 0, 0, missing))
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(padded.to(torch.int32), 2)

    @property
    def packed_nbytes(self) -> int:
        return self.packed.nbytes

    def codes(self) -> torch.Tensor:
        # The packed layout differs between CPU variants, so the operator itself unpacks it: times the identity,
        # with scale 1 and zero 8, the product is the codes, and small integers are exact in bfloat16.
        unit = torch.ones_like(self.scales_and_zeros)
        unit[..., 1] = 8
        columns = self.scales_and_zeros.shape[0] * GROUP
        blocks = torch.eye(columns, dtype=torch.bfloat16).split(512)
        codes = torch.cat([self._product(block.contiguous(), unit).to(torch.uint8) for block in blocks])
        return codes.t()[: self.shape[0], : self.shape[1]].contiguous()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        if not x.shape[0]:
            return x.new_empty(0, self.shape[0])
        activations = _pad_columns(x.to(torch.bfloat16)).contiguous()
        return self._product(activations, self.scales_and_zeros)[:, : self.shape[0]].to(x.dtype)

    def _product(self, x: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, scales_and_zeros)


@dataclass(frozen=True)
class QuantizedExpert:
    """One expert's draft copy: gate_up `(2I, H)` and down `(H, I)`."""

    gate_up: QuantizedMatrix
    down: QuantizedMatrix

    @property
    def nbytes(self) -> int:
        """Bytes held by both matrices."""
        return self.gate_up.nbytes + self.down.nbytes


def quantize(weight: torch.Tensor, bits: int) -> QuantizedMatrix:
    """Quantize `weight (out, in)` to `bits` (8, 4, 3 or 2) bits a weight, in the form that torch computes best with.

    Raises ValueError for other numbers of bits.
    """
    if bits == 4 and weight.device.type == "cpu" and has_fused_int4():
        return FusedInt4Matrix(*encode(weight, bits))
    return quantize_planes(weight, bits)


def quantize_planes(weight: torch.Tensor, bits: int) -> PlaneMatrix:
    """The same in planes at any number of bits, which the compiled kernels read."""
    codes, scales_and_zeros = encode(weight, bits)
    return PlaneMatrix(codes, bits, scales_and_zeros)


def quantize_expert(gate_up: torch.Tensor, down: torch.Tensor, bits: int) -> QuantizedExpert:
    """Both matrices of an expert at `bits` bits a weight."""
    return QuantizedExpert(quantize(gate_up, bits), quantize(down, bits))


def quantized_nbytes(shape: tuple[int, int], bits: int) -> int:
    """Bytes that `quantize` will hold for a matrix `(out, in)`, to plan memory before there is one."""
    rows, groups = shape[0], math.ceil(shape[1] / GROUP)
    if bits == 4 and has_fused_int4():
        rows += -rows % FusedInt4Matrix.ROWS
    return rows * groups * (GROUP * bits // 8 + 2 * torch.bfloat16.itemsize)


@functools.cache
def has_fused_int4() -> bool:
    """Whether this build of torch has a fused 4-bit CPU product that computes what we think it does."""
    codes = torch.arange(16 * GROUP, dtype=torch.uint8).view(16, GROUP) % 16
    try:
        matrix = FusedInt4Matrix(codes, torch.ones(1, 16, 2, dtype=torch.bfloat16))
        return torch.equal(matrix.codes(), codes)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def encode(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `(out, in)` uint8 and (scale, zero) `(groups, out, 2)` bfloat16. Raises ValueError for other bits."""
    if bits not in PLANES:
        raise ValueError(f"cannot quantize to {bits} bits: use one of {', '.join(map(str, PLANES))}")
    rows, columns = weight.shape
    levels, middle = 2**bits - 1, 2 ** (bits - 1)
    weight = weight.detach().float()
    if columns % GROUP:
        # Repeating the last column keeps the padding out of the last group's range.
        weight = torch.cat([weight, weight[:, -1:].expand(rows, -columns % GROUP)], dim=1)
    grouped = weight.reshape(rows, -1, GROUP)
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / levels).bfloat16()
    zero = (low + middle * scale.float()).bfloat16()
    # Codes are chosen against the rounded pair, so that its rounding does not add to theirs.
    step = torch.where(scale > 0, scale, torch.ones_like(scale)).float()
    codes = ((grouped - zero.float()) / step).round_().add_(middle).clamp_(0, levels).to(torch.uint8)
    pairs = torch.cat([scale, zero], dim=-1).transpose(0, 1).contiguous()
    return codes.view(rows, -1)[:, :columns].contiguous(), pairs


def _pad_columns(matrix: torch.Tensor) -> torch.Tensor:
    missing = -matrix.shape[1] % GROUP
    return F.pad(matrix, (0, missing)) if missing else matrix


def _pack_plane(values: torch.Tensor, width: int) -> torch.Tensor:
    """`(..., 32)` values of `width` bits into `(..., 4 * width)` bytes: byte j takes values j, j + 4w, …"""
    parts = values.unflatten(-1, (8 // width, GROUP * width // 8)).unbind(-2)
    packed = torch.zeros_like(parts[0])
    for place, part in enumerate(parts):
        packed |= part << (place * width)
    return packed


def _unpack_plane(packed: torch.Tensor, width: int) -> torch.Tensor:
    parts = [(packed >> (place * width)) & (2**width - 1) for place in range(8 // width)]
    return torch.cat(parts, dim=-1)
