"""Distributions, and the accept-or-correct rule that keeps speculation lossless.

Rejection sampling: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.5. A distribution at temperature 0
is a one-hot vector, for which the same rule is the greedy match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Below this the residual max(p - q, 0) is rounding noise: p equals q, and a rejection there is noise too.
MIN_RESIDUAL = 1e-9


@dataclass(frozen=True)
class SamplingParams:
    """How a next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """What verification decided. accepted (batch,): draft tokens accepted; token (batch,): the one that follows."""

    accepted: torch.Tensor
    token: torch.Tensor


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float32 logits (..., vocab) → the probabilities that are really sampled from, same shape."""
    if params.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Shifted by the maximum first: the winner stays finite at any temperature.
    scaled = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        # A token stays while the mass before it is below p, so the likeliest always does.
        dropped = ordered.cumsum(-1) - ordered >= params.top_p
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(dropped, 0.0))
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def displayed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities to show a person: those sampled from, but at temperature 0 those of temperature 1.

    A one-hot vector is exact and says nothing about how sure the model was.
    """
    return logits.softmax(-1) if params.temperature == 0 else distribution(logits, params)


def sample(probs: torch.Tensor, luck: torch.Tensor) -> torch.Tensor:
    """One token from each row of probs (batch, vocab), by luck (batch,) in [0, 1), float64 → (batch,)."""
    # At temperature 0 nothing is left to chance, and a draw over 49,152 tokens would take a millisecond.
    most, token = probs.max(-1)
    if bool((most == 1).all()):
        return token
    # The first token whose cumulated probability is above: never one of probability 0, which adds nothing.
    reached = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(reached, luck[:, None] * reached[:, -1:], right=True).squeeze(-1)


def propose(
    logits: torch.Tensor, params: SamplingParams, luck: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """What a draft guesses behind logits (batch, vocab): tokens (batch,), the q (batch, vocab) that they were sampled
    from, and their probabilities as a person sees them.

    At temperature 0 there is no q: nobody reads those of a vocabulary, and to write them takes longer than to choose.
    """
    if params.temperature == 0:
        # Of a whole vocabulary argmax is quicker than max, and softmax than logsumexp.
        tokens = logits.argmax(-1)
        return tokens, None, logits.softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    probs = distribution(logits, params)
    tokens = sample(probs, luck)
    return tokens, probs, probs.gather(-1, tokens[:, None]).squeeze(-1)


def match(best: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> Verdict:
    """`verify` at temperature 0, where p is one-hot at the target's `best` (batch, k+1): whatever q was."""
    k = tokens.shape[1]
    right = (tokens == best[:, :k]) & (torch.arange(k) < lengths[:, None])
    accepted = right.long().cumprod(-1).sum(-1)
    return Verdict(accepted, best.gather(1, accepted[:, None]).squeeze(1))


def verify(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, luck: torch.Tensor
) -> Verdict:
    """Accept the longest valid prefix of each draft and choose the token that follows it.

    target (batch, k+1, vocab): p after each position; draft (batch, k, vocab): the q that tokens (batch, k)
    were sampled from; lengths (batch,): how many tokens each sequence really drafted; luck (batch, k+1), in [0, 1),
    float64: its first lengths[b] decide about these tokens, the next one about what follows them.
    Draft token x at position i is accepted with probability min(1, p(x)/q(x)); the first rejected one is
    replaced by a sample of the residual max(p - q, 0); after a full acceptance the bonus token comes from p.
    """
    batch, k = tokens.shape
    picked = tokens.unsqueeze(-1)
    p = target[:, :k].gather(-1, picked).squeeze(-1)
    q = draft.gather(-1, picked).squeeze(-1)
    # Strictly below: a token with p = 0 is never accepted, one with p >= q always is (luck < 1).
    passed = (luck[:, :k] * q < p) & (torch.arange(k) < lengths[:, None])
    accepted = passed.long().cumprod(-1).sum(-1)
    rows = torch.arange(batch)
    after = target[rows, accepted]
    rejected = accepted < lengths
    if k and bool(rejected.any()):
        residual = (after - draft[rows, accepted.clamp(max=k - 1)]).clamp(min=0)
        mass = residual.sum(-1, keepdim=True)
        usable = rejected[:, None] & (mass > MIN_RESIDUAL)
        after = torch.where(usable, residual / mass.clamp(min=MIN_RESIDUAL), after)
    return Verdict(accepted, sample(after, luck[rows, lengths]))
