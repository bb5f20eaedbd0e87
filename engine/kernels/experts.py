"""The routed experts of one layer, each written twice: the compiled kernel's call, and torch as its reference.

Rows are grouped by expert: pair p sends row `rows[p]` of x through expert e, offsets[e] ≤ p < offsets[e + 1], and its
output goes to `slots[p]`. Outputs wait in float32 until all of a row's experts are in, then are summed in the order of
the router's top-k, whatever order the experts came in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

#: What the kernels can compute between gate and down projection (csrc/kernels.h), as torch computes it.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def expert_ffn(
    x: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    activation: str,
) -> None:
    """Fill `out (slots, H)` float32 at `slots` with what the experts make of their rows of `x (rows, H)`.

    gate_up `(2I, H)` and down `(H, I)` of each expert, in x's dtype. Raises RuntimeError for wrong shapes.
    """
    torch.ops.specviz.expert_ffn.default(x, gate_up, down, offsets, rows, slots, out, activation)


def expert_ffn_reference(
    x: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    activation: str,
) -> None:
    """`expert_ffn` in torch."""
    bounds = offsets.tolist()
    for expert, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        gate, up = F.linear(x[rows[begin:end]], gate_up[expert]).chunk(2, dim=-1)
        out[slots[begin:end]] = F.linear(ACTIVATIONS[activation](gate) * up, down[expert]).float()


def combine(outputs: torch.Tensor, weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Σ over position of weights `(rows, top_k)` · outputs `(rows, top_k, H)` float32: `(rows, H)` in like's dtype."""
    return torch.ops.specviz.combine.default(outputs, weights.float().contiguous(), like)


def combine_reference(outputs: torch.Tensor, weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`combine` in torch."""
    return (outputs * weights.float().unsqueeze(-1)).sum(1).to(like.dtype)


def quantized_moe(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    index: torch.Tensor,
    weights: torch.Tensor,
    bits: int,
    activation: str,
) -> torch.Tensor:
    """The weighted sum of each row's quantized experts: `(rows, H)` in the dtype of `x (rows, H)`.

    gate_up and down are (codes, scales) of all experts of a layer: `(E, 2I, groups, 4 · bits)` uint8 and
    `(E, 2I, groups, 2)` bfloat16, and the same with H rows. index and weights `(rows, top_k)`. Activations are
    rounded to bfloat16, as the weights are when the codes are unpacked. Raises RuntimeError for wrong shapes.
    """
    intermediate = gate_up[0].shape[1] // 2
    return torch.ops.specviz.quantized_moe.default(
        x.contiguous(), *gate_up, *down, index.contiguous(), weights.float().contiguous(), bits, activation,
        intermediate,
    )  # fmt: skip


def quantized_moe_reference(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    index: torch.Tensor,
    weights: torch.Tensor,
    bits: int,
    activation: str,
) -> torch.Tensor:
    """`quantized_moe` in torch."""
    hidden, (experts, double) = x.shape[1], gate_up[0].shape[:2]
    wide = [dequantize(*gate_up, expert, hidden, bits) for expert in range(experts)]
    narrow = [dequantize(*down, expert, double // 2, bits) for expert in range(experts)]
    slots = index.flatten().argsort(stable=True)
    offsets = F.pad(torch.bincount(index.flatten(), minlength=experts).cumsum(0), (1, 0))
    out = torch.empty(index.numel(), hidden)
    expert_ffn_reference(x.bfloat16(), wide, narrow, offsets, slots // index.shape[1], slots, out, activation)
    return combine_reference(out.view(*index.shape, hidden), weights, x)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, expert: int, columns: int, bits: int) -> torch.Tensor:
    """One expert's matrix `(rows, columns)` in bfloat16: (code − 2^(bits − 1)) · scale + zero, rounded once.

    In a group's bytes a plane of w bits has in byte j the codes j, j + 4w, j + 8w, …; for 3 bits, a plane of the two
    low bits comes before one of the high bit.
    """
    values, shift, at = torch.zeros(*codes.shape[1:3], 32), 0, 0
    for width in (2, 1) if bits == 3 else (bits,):
        plane = codes[expert, :, :, at : at + 4 * width].int()
        parts = [(plane >> (part * width)) & (2**width - 1) for part in range(8 // width)]
        values += torch.cat(parts, dim=-1) << shift
        shift, at = shift + width, at + 4 * width
    scale, zero = scales[expert].float().split(1, dim=-1)
    return ((values - 2 ** (bits - 1)) * scale + zero).flatten(1)[:, :columns].bfloat16()
