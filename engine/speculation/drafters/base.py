"""What every drafter has in common: its guess, and what it is told of the run that it guesses for."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.speculation.batch import Batch, Sequence
from engine.speculation.sampling import SamplingParams


@dataclass(frozen=True)
class Draft:
    """tokens (batch, k), probs (batch, k, vocab): the q each was sampled from, lengths (batch,): how many count.

    `probs` are None where each token was certain: at temperature 0, or because it was looked up.
    `confidence` (batch, k) is the draft's probability of each token as a person sees it (`displayed`).
    Tokens beyond a sequence's length are padding, and never reach the model (`engine/speculation/seam.py`).
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    lengths: torch.Tensor
    confidence: torch.Tensor

    @classmethod
    def empty(cls, batch: int) -> Draft:
        """No tokens for anybody."""
        none = torch.zeros(batch, 0)
        return cls(none.long(), None, torch.zeros(batch, dtype=torch.long), none)

    @classmethod
    def of(
        cls,
        tokens: list[torch.Tensor],
        probs: list[torch.Tensor | None],
        lengths: torch.Tensor,
        sure: list[torch.Tensor],
    ) -> Draft:
        """What passes proposed, one after the other (`propose`)."""
        known = [q for q in probs if q is not None]
        return cls(torch.stack(tokens, 1), torch.stack(known, 1) if known else None, lengths, torch.stack(sure, 1))

    def q(self, vocab: int) -> torch.Tensor:
        """`probs`, one-hot where tokens were certain."""
        return F.one_hot(self.tokens, vocab).float() if self.probs is None else self.probs

    @property
    def k(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True)
class DraftRun:
    """The run that a drafter serves: its sequences, how tokens are chosen, and the flag that ends it."""

    batch: Batch
    vocab: int
    params: SamplingParams
    stop: threading.Event


class Drafter(ABC):
    """Guesses up to k tokens a sequence; the target decides. Made for one run."""

    #: Bytes of fast memory that the drafter adds.
    nbytes = 0
    #: Whether it can draft at all; if not, every round is plain decoding.
    drafts = True
    #: Whether its passes ask the target's routers, and so foresee the experts that verification needs.
    routes = False

    def join(self, sequences: list[Sequence]) -> None:  # noqa: B027 - only a drafter with a memory of its own cares
        """The target has read the prompts of `sequences`, which take part from the next round on.

        Their slots may be those of sequences that have left.
        """

    @abstractmethod
    def draft(self, batch: Batch, k: int, on_token: Callable[[int], None]) -> Draft:
        """Guess up to min(k, what may still be emitted) tokens for each sequence.

        `on_token(i)` is called after pass i.
        """


class NoDrafter(Drafter):
    """Plain decoding: never guesses."""

    drafts = False

    def __init__(self, nbytes: int = 0) -> None:
        """`nbytes`: what a drafter that was switched off still holds."""
        self.nbytes = nbytes

    def draft(self, batch: Batch, k: int, on_token: Callable[[int], None]) -> Draft:
        return Draft.empty(len(batch.sequences))
