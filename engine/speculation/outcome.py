"""From a verdict to emitted tokens: cutting at the end of text, at stop strings and at the length limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from engine.events import Rejected, Token
from engine.speculation.batch import Sequence
from engine.speculation.drafters import Draft
from engine.speculation.sampling import SamplingParams, Verdict, displayed

# How many of the target's likeliest tokens an event shows.
ALTERNATIVES = 3


@dataclass
class RoundView:
    """A finished round of one batch, as `outcome` reads it.

    `logits` (batch, k+1, vocab) are the target's; `routes[layer][row]`: experts of each real row, sequence after
    sequence.
    """

    draft: Draft
    verdict: Verdict
    logits: torch.Tensor
    params: SamplingParams
    routes: dict[int, list[list[int]]]
    eos_ids: frozenset[int]
    tokenizer: PreTrainedTokenizerBase

    def shown(self, sequence: int, position: int) -> torch.Tensor:
        """(vocab,) the target's probabilities as a person sees them: row by row, because a large batch has megabytes
        of them and most rows that were rejected are never looked at.
        """
        return displayed(self.logits[sequence, position], self.params)

    def experts(self, sequence: int, position: int) -> list[list[int]]:
        """The experts of one row, per MoE layer."""
        first = int((self.draft.lengths[:sequence] + 1).sum())
        return [self.routes[layer][first + position] for layer in sorted(self.routes)]


def outcome(view: RoundView, number: int, sequence: Sequence) -> dict[str, Any]:
    """Append the round's tokens to `sequence` (the batch's `number`-th); returns the fields of its Round event."""
    accepted = int(view.verdict.accepted[number])
    drafted = int(view.draft.lengths[number])
    ids = [*view.draft.tokens[number, :accepted].tolist(), int(view.verdict.token[number])]
    tokens = []
    for position, token_id in enumerate(ids):
        text = _append(view, sequence, token_id)
        tokens.append(_token(view, number, position, token_id, text, _state(position, accepted, drafted)))
        if sequence.finish_reason is not None:
            break
    return {
        "sequence": sequence.number,
        "drafted": drafted,
        "verified": min(accepted + 1, drafted),
        "accepted": accepted,
        "tokens": tokens,
        "finished": sequence.finish_reason is not None,
        "rejected": [_rejected(view, number, position, accepted) for position in range(accepted, drafted)],
    }


def _append(view: RoundView, sequence: Sequence, token_id: int) -> str:
    """Add one token, decide whether the sequence ends with it; returns the text it completed."""
    sequence.new_ids.append(token_id)
    if token_id in view.eos_ids:
        sequence.finish_reason = "eos"
        return sequence.stream.finish()
    text, stopped = sequence.stream.push(token_id)
    if stopped:
        sequence.finish_reason = "stop"
    elif sequence.remaining == 0:
        sequence.finish_reason = "length"
        text += sequence.stream.finish()
    return text


def _state(position: int, accepted: int, drafted: int) -> str:
    if position < accepted:
        return "accepted"
    if drafted == 0:
        return "plain"
    return "bonus" if accepted == drafted else "corrected"


def _token(view: RoundView, number: int, position: int, token_id: int, text: str, state: str) -> Token:
    shown = view.shown(number, position)
    top = shown.topk(min(ALTERNATIVES, shown.shape[-1]))
    decode = view.tokenizer.decode
    drafted = position < int(view.draft.lengths[number])
    matches = drafted and int(view.draft.tokens[number, position]) == token_id
    return Token(
        token_id,
        text,
        state,
        position,
        float(shown[token_id]),
        float(view.draft.confidence[number, position]) if matches else None,
        [[decode([i]), p] for i, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)],
        view.experts(number, position),
    )


def _rejected(view: RoundView, number: int, position: int, accepted: int) -> Rejected:
    token_id = int(view.draft.tokens[number, position])
    reached = position == accepted
    return Rejected(
        token_id,
        str(view.tokenizer.decode([token_id])),
        position,
        reached,
        float(view.shown(number, position)[token_id]) if reached else None,
        float(view.draft.confidence[number, position]),
    )
