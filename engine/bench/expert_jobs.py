"""Routed experts, 16-bit and INT4: the compiled kernels, and what torch offers for the same rows and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.bench.timing import Bar, Carousel, Job, Rival
from engine.kernels.experts import expert_ffn, quantized_moe
from engine.kernels.pages import copies
from engine.offload.quantize import FusedInt4Matrix, PlaneMatrix, has_fused_int4, quantize_planes

#: Distinct weight rows of a matrix; the rest repeats them. Bandwidth does not mind, and quantizing takes long.
DISTINCT_ROWS = 256

Call = Callable[[], torch.Tensor]
#: One layer's experts: every tensor has one entry an expert.
Layers = Carousel[list[torch.Tensor]]


@dataclass(frozen=True)
class ExpertSize:
    """An expert (hidden, intermediate), and how many of them one call runs: as many as `model` routes a token to."""

    hidden: int
    intermediate: int
    top_k: int
    model: str

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's call in bfloat16: gate, up and down of top_k experts."""
        return self.top_k * 3 * self.hidden * self.intermediate * 2

    def name(self, kind: str, rows: int) -> str:
        return f"{kind} experts {self.hidden}×{self.intermediate}, {rows} row{'s' if rows > 1 else ''}"


def plain_jobs(sizes: tuple[ExpertSize, ...], row_counts: tuple[int, ...], stream_bytes: int) -> Iterator[Job]:
    """16-bit experts: top_k of them in a call, each with all rows, their weights fresh from memory."""
    for size in sizes:
        yield from _plain_jobs(size, row_counts, stream_bytes)


def quantized_jobs(sizes: tuple[ExpertSize, ...], row_counts: tuple[int, ...], stream_bytes: int) -> Iterator[Job]:
    """INT4 experts against torch's INT4 product and the same values in bfloat16.

    At one row the memory is the limit, and the bar is a share of it; at more rows the rivals are.
    """
    for size in sizes:
        yield from _quantized_jobs(size, row_counts, stream_bytes)


def _plain_jobs(size: ExpertSize, row_counts: tuple[int, ...], stream_bytes: int) -> Iterator[Job]:
    layers = _slabs(size, _plain(size), stream_bytes)
    for rows in row_counts:
        x = _rows(size, rows)
        rivals = [
            Rival("expert_ffn", _expert_ffn(size, x, layers), size.nbytes, ours=True),
            Rival("F.linear", _linear(size, x, layers), size.nbytes),
            Rival("bmm", _bmm(size, x, layers), size.nbytes),
            Rival("grouped_mm", _grouped_mm(size, x, layers), size.nbytes),
        ]
        if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            call = _repacked(size, x, stream_bytes)
            rivals.append(Rival("oneDNN, weights repacked before", call, size.nbytes, bound=True))
        yield Job(size.name("bfloat16", rows), "streamed", rivals, [Bar(ratio=2.0), Bar(share=0.6)])


def _quantized_jobs(size: ExpertSize, row_counts: tuple[int, ...], stream_bytes: int) -> Iterator[Job]:
    matrices = [quantize_planes(matrix, 4) for matrix in _distinct(size)]
    packed = _slabs(size, _packed(size, matrices), stream_bytes)
    fused = _fused_layers(size, matrices, stream_bytes) if has_fused_int4() else None
    plain = [_tiled(m.dequantize(torch.bfloat16), n) for m, n in zip(matrices, _heights(size), strict=True)]
    layers = _slabs(size, plain, stream_bytes)
    for rows in row_counts:
        x = _rows(size, rows)
        rivals = [Rival("quantized_moe", *_quantized_moe(size, x, packed), ours=True)]
        if fused is not None:
            rivals.append(Rival("aten INT4", *_aten_int4(size, x, fused)))
        rivals.append(Rival("F.linear, bfloat16", _summed(_linear(size, x, layers)), size.nbytes))
        bars = [Bar(share=0.5)] if rows == 1 else [Bar(ratio=2.0)]
        yield Job(size.name("INT4", rows), "streamed", rivals, bars)


def _rows(size: ExpertSize, rows: int) -> torch.Tensor:
    return torch.randn(rows, size.hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()


def _heights(size: ExpertSize) -> tuple[int, int]:
    """Weight rows of gate_up and down."""
    return 2 * size.intermediate, size.hidden


def _distinct(size: ExpertSize) -> list[torch.Tensor]:
    """The distinct weight rows of gate_up and down."""
    generator = torch.Generator().manual_seed(size.hidden)
    shapes = zip(_heights(size), (size.hidden, size.intermediate), strict=True)
    return [
        (torch.randn(min(rows, DISTINCT_ROWS), columns, generator=generator) * columns**-0.5).bfloat16()
        for rows, columns in shapes
    ]


def _tiled(distinct: torch.Tensor, rows: int) -> torch.Tensor:
    return distinct.repeat(-(-rows // len(distinct)), *[1] * (distinct.dim() - 1))[:rows].contiguous()


def _plain(size: ExpertSize) -> list[torch.Tensor]:
    return [_tiled(matrix, rows) for matrix, rows in zip(_distinct(size), _heights(size), strict=True)]


def _packed(size: ExpertSize, matrices: list[PlaneMatrix]) -> list[torch.Tensor]:
    """Codes and scales of gate_up, then of down, in quantized_moe's layout."""
    return [
        _tiled(part, rows)
        for matrix, rows in zip(matrices, _heights(size), strict=True)
        for part in matrix.packed()
    ]  # fmt: skip


def _slabs(size: ExpertSize, parts: list[torch.Tensor], stream_bytes: int) -> Layers:
    """Layers of top_k equal experts, each kind of matrix in one piece of memory, at least `stream_bytes` together."""
    layers = _count(sum(part.nbytes for part in parts) * size.top_k, stream_bytes)
    slabs = [copies(part, layers, size.top_k) for part in parts]
    return Carousel([[slab[layer] for slab in slabs] for layer in range(layers)])


def _count(nbytes: int, stream_bytes: int) -> int:
    return max(1, -(-stream_bytes // nbytes))


def _gated(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return F.silu(gate) * up


def _expert_ffn(size: ExpertSize, x: torch.Tensor, layers: Layers) -> Call:
    rows, pairs = len(x), len(x) * size.top_k
    offsets = torch.arange(size.top_k + 1) * rows
    row_of, slots = torch.arange(rows).repeat(size.top_k), torch.arange(pairs)
    out = torch.empty(pairs, size.hidden)

    def call() -> torch.Tensor:
        gate_up, down = layers.next()
        expert_ffn(x, gate_up.unbind(), down.unbind(), offsets, row_of, slots, out, "silu")
        return out.view(size.top_k, rows, -1)

    return call


def _linear(size: ExpertSize, x: torch.Tensor, layers: Layers) -> Call:
    """A product an expert, as most code does it."""

    def call() -> torch.Tensor:
        gate_up, down = layers.next()
        return torch.stack([F.linear(_gated(F.linear(x, gate_up[e])), down[e]) for e in range(size.top_k)])

    return call


def _bmm(size: ExpertSize, x: torch.Tensor, layers: Layers) -> Call:
    """All experts in one batched product: transformers' "batched_mm"."""
    batched = x.expand(size.top_k, *x.shape).contiguous()

    def call() -> torch.Tensor:
        gate_up, down = layers.next()
        return torch.bmm(_gated(torch.bmm(batched, gate_up.transpose(1, 2))), down.transpose(1, 2))

    return call


def _grouped_mm(size: ExpertSize, x: torch.Tensor, layers: Layers) -> Call:
    """All experts in one grouped product: transformers' "grouped_mm"."""
    stacked, ends = x.repeat(size.top_k, 1), torch.arange(1, size.top_k + 1, dtype=torch.int32) * len(x)

    def call() -> torch.Tensor:
        gate_up, down = layers.next()
        hidden = _gated(F.grouped_mm(stacked, gate_up.transpose(1, 2), offs=ends))
        return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends).view(size.top_k, len(x), -1)

    return call


def _repacked(size: ExpertSize, x: torch.Tensor, stream_bytes: int) -> Call:
    """Weights in oneDNN's own layout for this number of rows, as torch.compile's freezing makes them.

    Not the same job: weights that come over a link would have to be repacked each time they arrive.
    """
    parts = _plain(size)
    pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    experts = size.top_k * _count(size.nbytes, stream_bytes)
    pieces = Carousel([[pack(part, len(x)) for part in parts] for _ in range(experts)])

    def call() -> torch.Tensor:
        outputs = []
        for _ in range(size.top_k):
            gate_up, down = pieces.next()
            hidden = _gated(linear(x, gate_up, None, "none", [], ""))
            outputs.append(linear(hidden, down, None, "none", [], ""))
        return torch.stack(outputs)

    return call


def _summed(outputs: Call) -> Call:
    """The mean over the experts, as quantized_moe computes with equal weights."""
    return lambda: outputs().mean(0)


def _quantized_moe(size: ExpertSize, x: torch.Tensor, layers: Layers) -> tuple[Call, int]:
    index = torch.arange(size.top_k).expand(len(x), size.top_k).contiguous()
    weights = torch.full((len(x), size.top_k), 1 / size.top_k)

    def call() -> torch.Tensor:
        up_codes, up_scales, down_codes, down_scales = layers.next()
        return quantized_moe(x, (up_codes, up_scales), (down_codes, down_scales), index, weights, 4, "silu")

    return call, sum(part.nbytes for part in layers.next())


def _fused_layers(size: ExpertSize, matrices: list[PlaneMatrix], stream_bytes: int) -> Carousel[list[FusedInt4Matrix]]:
    """Experts in the layout of torch's INT4 product, each with memory of its own."""

    def fused(matrix: PlaneMatrix, rows: int) -> FusedInt4Matrix:
        scales = _tiled(matrix.scales_and_zeros.transpose(0, 1), rows).transpose(0, 1).contiguous()
        return FusedInt4Matrix(_tiled(matrix.codes(), rows), scales)

    expert = [fused(matrix, rows) for matrix, rows in zip(matrices, _heights(size), strict=True)]
    experts = size.top_k * _count(size.top_k * sum(matrix.nbytes for matrix in expert), stream_bytes)
    slabs = [(copies(m.packed, experts), copies(m.scales_and_zeros, experts)) for m in expert]

    def moved(matrix: FusedInt4Matrix, packed: torch.Tensor, scales: torch.Tensor) -> FusedInt4Matrix:
        other = copy(matrix)
        other.packed, other.scales_and_zeros = packed, scales
        return other

    pairs = zip(expert, slabs, strict=True)
    columns = [[moved(matrix, packed[e], scales[e]) for e in range(experts)] for matrix, (packed, scales) in pairs]
    return Carousel([list(matrices) for matrices in zip(*columns, strict=True)])


def _aten_int4(size: ExpertSize, x: torch.Tensor, pieces: Carousel[list[FusedInt4Matrix]]) -> tuple[Call, int]:
    def call() -> torch.Tensor:
        outputs = []
        for _ in range(size.top_k):
            gate_up, down = pieces.next()
            outputs.append(down.linear(_gated(gate_up.linear(x))))
        return torch.stack(outputs)

    return _summed(call), size.top_k * sum(matrix.nbytes for matrix in pieces.next())
