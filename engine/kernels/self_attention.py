"""A decoder layer's self-attention in one call: projections, norms, rotation, the KV cache, attention, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels.attention import chunked_attention_reference
from engine.kernels.norm import rms_norm_reference


@dataclass(frozen=True)
class AttentionWeights:
    """What a layer's attention is made of.

    `qkv` ((heads + 2 kv_heads) · dim, H) holds the rows of the query, key and value projections, `out` (H, heads · dim)
    those of the output's; a bias has one element a row. A norm's weight has dim elements, or those of all heads.
    """

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    out: torch.Tensor
    out_bias: torch.Tensor | None
    scale: float


def self_attention(
    x: torch.Tensor,
    weights: AttentionWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    window: int = 0,
) -> torch.Tensor:
    """x (batch, rows, H) → (batch, rows, H); the new keys and values are written to the cache first.

    cos and sin (batch or 1, rows, rotary) turn the first `rotary` features of a head, as halves (RoFormer, arXiv
    2104.09864); key, value, slots, starts and window as for `chunked_attention`. One dtype throughout, float32 or
    bfloat16. Raises RuntimeError for wrong shapes or dtypes.
    """
    w = weights
    return torch.ops.specviz.self_attention.default(
        x, w.qkv, w.qkv_bias, w.q_norm, w.k_norm, w.eps, cos, sin, key, value, slots, starts, w.scale, window,
        w.out, w.out_bias,
    )  # fmt: skip


def self_attention_reference(
    x: torch.Tensor,
    weights: AttentionWeights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    window: int = 0,
) -> torch.Tensor:
    """`self_attention` in torch, with modeling code's roundings."""
    queries, keys, values = project(x, weights, cos, sin, *key.shape[1::2])
    places = slots[:, None], starts[:, None] + torch.arange(x.shape[1])
    key.transpose(1, 2)[places] = keys
    value.transpose(1, 2)[places] = values
    queries = queries.transpose(1, 2)
    out = chunked_attention_reference(queries, key, value, slots, starts, weights.scale, window)
    return F.linear(out.flatten(2), weights.out, weights.out_bias)


def project(
    x: torch.Tensor, weights: AttentionWeights, cos: torch.Tensor, sin: torch.Tensor, kv_heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What attention sees of x (batch, rows, H): queries, keys and values, each (batch, rows, its heads, dim)."""
    heads = weights.out.shape[1] // dim
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    queries, keys, values = F.linear(x, weights.qkv, weights.qkv_bias).split(sizes, dim=-1)
    queries, keys = _normed(queries, weights.q_norm, weights.eps), _normed(keys, weights.k_norm, weights.eps)
    queries, keys, values = (part.unflatten(-1, (-1, dim)) for part in (queries, keys, values))
    return _rotated(queries, cos, sin), _rotated(keys, cos, sin), values


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    return rms_norm_reference(x.unflatten(-1, (-1, len(weight))), weight, eps).flatten(-2)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (batch, rows, heads, dim), its first features turned by angles (batch or 1, rows, rotary)."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos[:, :, None] + torch.cat((-b, a), -1) * sin[:, :, None], rest), -1)
