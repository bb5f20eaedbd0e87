"""Inputs for the kernels, and what they should give: float64 values with a bound on the error of the kernels.

The bound follows the arithmetic step by step, whatever the order of the sums, so nothing in it is fitted to what the
kernels happen to give: a float32 operation is off by at most 2^-24 of its result, rounding to bfloat16 by 2^-8, and
tiny numbers may become zero.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st

from engine.offload.quantize import PlaneMatrix

VARIANTS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
DTYPES = (torch.float32, torch.bfloat16)
BITS = (8, 4, 3, 2)
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
FLOAT = ROUNDING[torch.float32]
#: The smallest normal number: the bfloat16 instructions take less for zero.
TINY = 2.0**-126
#: The steepest slope of silu and gelu.
STEEPEST = 1.13

#: Few examples, the same ones each time; fewer where sanitizers or the emulated tiles make each of them slow.
few_examples = settings(
    max_examples=int(os.environ.get("SPECVIZ_TEST_EXAMPLES", "25")), deadline=None, derandomize=True, database=None
)
# Around every tile of rows, and more than one product takes.
row_counts = st.sampled_from([*range(1, 18), 64, 65, 130])
# Multiples of no vector, group, tile or depth block, but for 64.
SIZES = (1, 7, 31, 33, 64, 100, 1030)
sizes = st.sampled_from(SIZES)
#: (hidden, intermediate) of experts: every pair, but for the largest with itself.
expert_sizes = st.sampled_from([(h, i) for h in SIZES for i in SIZES if h * i <= 1030 * 100])
seeds = st.integers(0, 2**32)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to the last bit, NaN and the sign of zero included."""
    assert a.dtype == b.dtype and a.shape == b.shape
    as_integers = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.view(as_integers), b.view(as_integers))


@dataclass(frozen=True)
class Bounded:
    """Exact values, and how far from them a kernel may be."""

    value: torch.Tensor
    error: torch.Tensor

    @staticmethod
    def exactly(x: torch.Tensor) -> Bounded:
        return Bounded(x.double(), torch.zeros_like(x, dtype=torch.float64))

    def times_matrix(self, weight: torch.Tensor) -> Bounded:
        """Times the transposed `weight (out, in)`, summed in float32 in any order."""
        depth, size = weight.shape[1], weight.double().abs().t()
        terms = (self.value.abs() + self.error) @ size
        error = self.error @ size + (depth + 2) * FLOAT * terms + 2 * depth * TINY
        return Bounded(self.value @ weight.double().t(), error)

    def plus(self, bias: torch.Tensor) -> Bounded:
        return Bounded(self.value + bias.double(), self.error).rounded(torch.float32)

    def times(self, other: Bounded) -> Bounded:
        error = self.error * other.value.abs() + other.error * self.value.abs() + self.error * other.error
        return Bounded(self.value * other.value, error).rounded(torch.float32)

    def activated(self, activation: str) -> Bounded:
        # An exponential to 2 units in the last place, a division, and a few products.
        error = STEEPEST * self.error + 16 * FLOAT * (self.value.abs() + self.error) + TINY
        return Bounded(ACTIVATIONS[activation](self.value), error)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        return Bounded(self.value, self.error + ROUNDING[dtype] * (self.value.abs() + self.error) + TINY)

    def check(self, found: torch.Tensor) -> None:
        off = (found.double() - self.value).abs()
        assert torch.isfinite(found).all()
        assert (off <= self.error).all(), f"off by {(off / self.error).max():.3g} times the bound"


@dataclass(frozen=True)
class Experts:
    """Plain experts: gate_up `(2I, H)` and down `(H, I)` each."""

    gate_up: list[torch.Tensor]
    down: list[torch.Tensor]

    @staticmethod
    def random(seed: int, count: int, hidden: int, intermediate: int, dtype: torch.dtype) -> Experts:
        return Experts(
            [random(seed + e, 2 * intermediate, hidden, dtype=dtype, scale=hidden**-0.5) for e in range(count)],
            [random(seed - 1 - e, hidden, intermediate, dtype=dtype, scale=intermediate**-0.5) for e in range(count)],
        )

    def expected(self, expert: int, x: torch.Tensor, activation: str) -> Bounded:
        """What expert number `expert` makes of the rows `x`; in bfloat16, gate·up is rounded before `down`."""
        gate_up = Bounded.exactly(x).times_matrix(self.gate_up[expert])
        intermediate = self.down[expert].shape[1]
        gate = Bounded(gate_up.value[:, :intermediate], gate_up.error[:, :intermediate])
        up = Bounded(gate_up.value[:, intermediate:], gate_up.error[:, intermediate:])
        hidden = gate.activated(activation).times(up).rounded(self.down[expert].dtype)
        return hidden.times_matrix(self.down[expert])

    def run(self, x: torch.Tensor, index: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """The operator's output for `index (rows, top_k)`: `(rows, top_k, hidden)` float32."""
        offsets, rows, slots = grouped(index, len(self.down))
        out = torch.full((index.numel(), x.shape[1]), float("nan"))
        torch.ops.specviz.expert_ffn(x, self.gate_up, self.down, offsets, rows, slots, out, activation)
        return out.view(*index.shape, x.shape[1])


@dataclass(frozen=True)
class QuantizedExperts:
    """Experts as the operator takes them, and the bfloat16 weights that the codes stand for."""

    bits: int
    gate_up: torch.Tensor  # (E, 2I, groups, 4 · bits) uint8
    gate_up_scales: torch.Tensor  # (E, 2I, groups, 2) bfloat16
    down: torch.Tensor
    down_scales: torch.Tensor
    weights: Experts

    @staticmethod
    def random(seed: int, bits: int, count: int, hidden: int, intermediate: int) -> QuantizedExperts:
        """All codes are as likely, and no scale or zero is round."""
        up = [_random_matrix(seed + e, bits, 2 * intermediate, hidden) for e in range(count)]
        down = [_random_matrix(seed - 1 - e, bits, hidden, intermediate) for e in range(count)]
        weights = Experts([m.dequantize(torch.bfloat16) for m in up], [m.dequantize(torch.bfloat16) for m in down])
        return QuantizedExperts(bits, *_stacked(up), *_stacked(down), weights)

    def run(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, activation: str = "silu"
    ) -> torch.Tensor:
        """The operator's output `(rows, hidden)` in x's dtype."""
        intermediate = self.gate_up.shape[1] // 2
        return torch.ops.specviz.quantized_moe(
            *(x, self.gate_up, self.gate_up_scales, self.down, self.down_scales),
            *(index, weights, self.bits, activation, intermediate),
        )


def choice(seed: int, rows: int, top_k: int, experts: int, *, only: int | None = None) -> torch.Tensor:
    """`(rows, top_k)` expert numbers, all `only` if that is given."""
    if only is not None:
        return torch.full((rows, top_k), only)
    return torch.randint(experts, (rows, top_k), generator=torch.Generator().manual_seed(seed))


def grouped(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Offsets, rows and slots of the pairs of `index (rows, top_k)`, sorted by expert."""
    slots = index.flatten().argsort(stable=True)
    counts = torch.bincount(index.flatten(), minlength=experts)
    return F.pad(counts.cumsum(0), (1, 0)), slots // max(index.shape[1], 1), slots


def some_rows(rows: int) -> Sequence[int]:
    """Rows to look at one by one: all of a few, otherwise some from each end, the middle and around 64."""
    return range(rows) if rows <= 17 else sorted({0, 1, 15, 16, rows // 2, *range(62, min(rows, 66)), rows - 1})


def _random_matrix(seed: int, bits: int, rows: int, columns: int) -> PlaneMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    groups = -(-columns // 32)
    scales = torch.rand(groups, rows, 1, generator=generator) * 4 * columns**-0.5 / 2**bits
    zeros = torch.randn(groups, rows, 1, generator=generator) * 0.1 * columns**-0.5
    return PlaneMatrix(codes, bits, torch.cat([scales, zeros], -1).bfloat16())


def _stacked(matrices: list[PlaneMatrix]) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = zip(*(matrix.packed() for matrix in matrices), strict=True)
    return torch.stack(codes), torch.stack(scales)
