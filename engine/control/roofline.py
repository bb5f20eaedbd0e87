"""The amortization roofline (MoE-SpeQ, section 3.2), with the bonus token, overlap and k = 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CycleCosts:
    """What one round of draft length k costs, in seconds, before overlap.

    `draft`: k draft passes; `verify`: the pass over k+1 rows; `transfer`: moving what is missing;
    `overhead`: everything else; `prefetching`: whether transfers may start while the draft runs.
    """

    draft: float
    verify: float
    transfer: float
    overhead: float
    prefetching: bool


def cycle_seconds(costs: CycleCosts) -> float:
    """T_cycle(k): what does not fit under the draft is fetched during verification.

    The paper's equation 3 adds T_pcie,new without overlap. Here prefetched transfers hide under the draft, and
    the rest hides under verification only as far as it is still on its way (demand loads are waited for).
    """
    hidden_by_draft = min(costs.transfer, costs.draft) if costs.prefetching else 0.0
    rest = costs.transfer - hidden_by_draft
    verify = max(costs.verify, rest) if costs.prefetching else costs.verify + rest
    return costs.draft + verify + costs.overhead


def rate(expected_tokens: float, seconds: float) -> float:
    """Θ(k) in tokens/s (equation 2)."""
    return expected_tokens / seconds if seconds > 0 else 0.0
