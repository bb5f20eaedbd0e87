"""The amortization roofline (MoE-SpeQ, section 3.2), with the bonus token, overlap and k = 0."""

from __future__ import annotations

from typing import NamedTuple


class CycleCosts(NamedTuple):
    """What one round of draft length k costs, in seconds, before overlap.

    `draft`: the draft's passes; `verify`: the pass over k+1 rows; `transfer`: moving what is missing; `early`: the
    part of that which may start while the draft runs (0 without prefetching); `overhead`: everything else.
    `hiding`: the share of compute under which early transfers really proceed.
    """

    draft: float
    verify: float
    transfer: float
    early: float
    overhead: float
    hiding: float = 1.0


def cycle_seconds(costs: CycleCosts) -> float:
    """T_cycle(k): early transfers hide under draft and verification, the others are waited for.

    The paper's equation 3 adds T_pcie,new without overlap, and knows no limit to what can be fetched early.
    """
    compute = costs.draft + costs.verify
    waited = max(costs.early - costs.hiding * compute, 0.0) + costs.transfer - costs.early
    return compute + waited + costs.overhead


def rate(expected_tokens: float, seconds: float) -> float:
    """Θ(k) in tokens/s (equation 2)."""
    return expected_tokens / seconds if seconds > 0 else 0.0
