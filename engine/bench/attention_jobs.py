"""Verification attention: the compiled kernel, torch's own, and the grouped matmul that is its reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.bench.timing import Bar, Carousel, Job, Rival
from engine.kernels.attention import band, chunked_attention, masked_attention
from engine.kernels.pages import copies
from engine.machine import last_level_bytes

SDPA = "scaled_dot_product_attention"


@dataclass(frozen=True)
class AttentionSize:
    """`rows` new rows of each of `batch` sequences over `length` tokens of KV. `ratio`: the bar against SDPA."""

    batch: int
    rows: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    ratio: float = 4.0

    @property
    def name(self) -> str:
        batch = f"batch {self.batch}, " if self.batch > 1 else ""
        return f"attention, {batch}{self.rows} rows, {self.length} tokens"

    @property
    def nbytes(self) -> int:
        """K and V of all sequences, in bfloat16."""
        return self.batch * self.length * self.kv_heads * self.dim * 2 * 2


def attention_jobs(sizes: tuple[AttentionSize, ...], stream_bytes: int) -> Iterator[Job]:
    """Each size with its KV streamed, as a step over all layers finds it, and from cache where one layer fits."""
    for size in sizes:
        yield _job(size, "streamed", max(1, -(-stream_bytes // size.nbytes)))
        if size.nbytes <= last_level_bytes():
            yield _job(size, "cache-resident", 1)


def _job(size: AttentionSize, state: str, count: int) -> Job:
    generator = torch.Generator().manual_seed(size.length)
    q = torch.randn(size.batch, size.heads, size.rows, size.dim, generator=generator).bfloat16()
    kv = torch.randn(2, size.batch, size.kv_heads, size.length, size.dim, generator=generator).bfloat16()
    layers = copies(kv, count)
    carousel = Carousel([(layer[0], layer[1]) for layer in layers])
    slots, starts = torch.arange(size.batch), torch.full((size.batch,), size.length - size.rows)
    mask, scale = band(starts, size.rows, size.length), size.dim**-0.5

    def kernel() -> torch.Tensor:
        key, value = carousel.next()
        return chunked_attention(q, key, value, slots, starts, scale)

    def sdpa() -> torch.Tensor:
        key, value = carousel.next()
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    def grouped() -> torch.Tensor:
        key, value = carousel.next()
        return masked_attention(q, key, value, mask, scale)

    return Job(
        name=size.name,
        state=state,
        rivals=[
            Rival("chunked_attention", kernel, size.nbytes, ours=True),
            Rival(SDPA, sdpa, size.nbytes),
            Rival("grouped matmul", grouped, size.nbytes),
        ],
        bars=[Bar(ratio=size.ratio), Bar(share=0.6)],
        base=SDPA,
        memory=[] if state == "streamed" else [layers],
    )
