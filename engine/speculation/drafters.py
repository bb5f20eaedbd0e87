"""Who guesses the next tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import UsageError
from engine.model.runner import ModelRunner
from engine.offload.experts import QuantizedExperts
from engine.speculation.batch import Batch
from engine.speculation.sampling import SamplingParams, displayed, distribution, sample


@dataclass(frozen=True)
class Draft:
    """tokens (batch, k), probs (batch, k, vocab): the q each was sampled from, lengths (batch,): how many count.

    `confidence` (batch, k) is the draft's probability of each token as a person sees it (`displayed`).
    """

    tokens: torch.Tensor
    probs: torch.Tensor
    lengths: torch.Tensor
    confidence: torch.Tensor

    @classmethod
    def empty(cls, batch: int, vocab: int) -> Draft:
        """No tokens for anybody."""
        none = torch.zeros(batch, 0)
        return cls(none.long(), torch.zeros(batch, 0, vocab), torch.zeros(batch, dtype=torch.long), none)

    @property
    def k(self) -> int:
        return self.tokens.shape[1]


class Drafter(ABC):
    """Guesses up to k tokens a sequence; the target decides."""

    #: Bytes of fast memory that the drafter adds.
    nbytes = 0
    #: Whether it can draft at all; if not, every round is plain decoding.
    drafts = True

    @abstractmethod
    def draft(self, batch: Batch, k: int, route_last: bool, on_token: Callable[[int], None]) -> Draft:
        """Guess min(k, what may still be emitted) tokens for each sequence.

        `route_last` asks for one more pass over the last draft token, whose only use is to learn its routes.
        `on_token(i)` is called after pass i.
        """


class NoDrafter(Drafter):
    """Plain decoding: never guesses."""

    drafts = False

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def draft(self, batch: Batch, k: int, route_last: bool, on_token: Callable[[int], None]) -> Draft:
        return Draft.empty(len(batch.sequences), self._vocab)


class SelfDrafter(Drafter):
    """The target itself with quantized experts; attention, routers and KV cache are the target's own.

    It reads the target's KV and appends its own behind it; verification overwrites those (MoE-SpeQ, section 3.4).
    """

    def __init__(
        self, runner: ModelRunner, experts: QuantizedExperts, params: SamplingParams, generator: torch.Generator
    ) -> None:
        self._runner = runner
        self._experts = experts
        self._params = params
        self._generator = generator
        self.nbytes = experts.nbytes

    def draft(self, batch: Batch, k: int, route_last: bool, on_token: Callable[[int], None]) -> Draft:
        lengths = batch.draft_lengths(k)
        longest = int(lengths.max())
        slots, starts, ids = batch.slots, batch.starts, batch.current
        tokens, probs, confidence = [], [], []
        for i in range(longest + int(route_last and longest > 0)):
            # A sequence that drafts fewer tokens keeps its place in the batch, but its rows reach no expert.
            rows = ((lengths >= i) if route_last else (lengths > i)).long()
            logits = self._runner.forward(batch.cache, self._experts, ids, slots, starts + i, rows, keep=1)
            if i < longest:
                probs.append(distribution(logits[:, 0], self._params))
                tokens.append(sample(probs[-1], self._generator))
                ids = tokens[-1][:, None]
                confidence.append(displayed(logits[:, 0], self._params).gather(-1, ids).squeeze(-1))
            on_token(i)
        if not tokens:
            return Draft.empty(len(batch.sequences), self._runner.config.vocab_size)
        return Draft(torch.stack(tokens, 1), torch.stack(probs, 1), lengths, torch.stack(confidence, 1))


def self_draft_bits(kind: str) -> int | None:
    """The precision of a self-draft, or None for `none`. Raises UsageError for an unknown kind."""
    known = {"none": None, "self-int8": 8, "self-int4": 4, "self-int3": 3, "self-int2": 2}
    if kind not in known:
        raise UsageError(f"unknown draft {kind!r}: use one of {', '.join(known)}")
    return known[kind]
