"""Experts in MXFP4, as gpt-oss is published: 4-bit floats, 32 of which share a power of two.

transformers dequantizes them where no GPU takes them as they are; so do we, once, while packing. The values are exact
in bfloat16, four times as large.
"""

from __future__ import annotations

import math

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

GROUP = 32
#: What a matrix's two tensors are called behind its own name, in the order in which a record holds them.
PARTS = ("blocks", "scales")


def nbytes(numel: int) -> int:
    """Stored bytes of so many weights."""
    return numel // 2 + numel // GROUP


def decode(raw: torch.Tensor, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    """The matrices (out, in) that lie one behind the other in `raw` (flat uint8), in bfloat16."""
    matrices = []
    at = 0
    for rows, columns in shapes:
        middle, end = at + rows * columns // 2, at + nbytes(math.prod((rows, columns)))
        blocks = raw[at:middle].view(1, rows, columns // GROUP, GROUP // 2)
        scales = raw[middle:end].view(1, rows, columns // GROUP)
        matrices.append(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)[0].t().contiguous())
        at = end
    return matrices
