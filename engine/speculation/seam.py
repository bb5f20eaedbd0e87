"""Where a draft meets the target: nothing that a drafter gets wrong may reach the model or the text."""

from __future__ import annotations

import dataclasses

import torch

from engine.speculation.batch import Batch
from engine.speculation.drafters.base import Draft

#: How far the probabilities of a float32 distribution may be from a sum of one.
ROUNDING = 1e-3


def flaw(draft: Draft, batch: Batch, k: int, vocab: int) -> str | None:
    """What is wrong with a draft of at most k tokens a sequence, in words; None when it may be verified.

    Fewer tokens than asked for are fine, in any sequence. Whatever lies beyond a sequence's length is padding.
    """
    shape = (len(batch.sequences), draft.k)
    fits = draft.probs is None or draft.probs.shape == (*shape, vocab)
    if draft.tokens.shape != shape or draft.confidence.shape != shape or not fits:
        return f"its tensors do not fit {shape[0]} sequences and {vocab} tokens of vocabulary"
    if draft.lengths.shape != shape[:1] or bool((draft.lengths < 0).any()) or bool((draft.lengths > draft.k).any()):
        return "its lengths are not those of its tokens"
    allowed = batch.draft_lengths(k)
    if bool((draft.lengths > allowed).any()):
        number = int((draft.lengths > allowed).nonzero()[0])
        return f"it proposed {int(draft.lengths[number])} tokens where {int(allowed[number])} were asked for"
    counted = torch.arange(draft.k) < draft.lengths[:, None]
    tokens = draft.tokens[counted]
    outside = (tokens < 0) | (tokens >= vocab)
    if bool(outside.any()):
        return f"it proposed token {int(tokens[outside][0])}, and the vocabulary has {vocab}"
    if draft.probs is None:
        return None
    probs = draft.probs[counted]
    # Written so that NaN fails too: every comparison with it is false.
    sums_to_one = bool(((probs.sum(-1) - 1).abs() <= ROUNDING).all()) and bool((probs >= 0).all())
    if not sums_to_one or not bool((probs.gather(-1, tokens[:, None]) > 0).all()):
        return "its probabilities are not a distribution that its tokens were sampled from"
    return None


def padded(draft: Draft) -> Draft:
    """The same draft with a token that every vocabulary has wherever nothing counts: padding rows are computed, too."""
    counted = torch.arange(draft.k) < draft.lengths[:, None]
    return dataclasses.replace(draft, tokens=draft.tokens.masked_fill(~counted, 0))
