"""The sequences that one step serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Counts
from dataclasses import dataclass, field

import torch

from engine.model.kv_cache import KVCache
from engine.model.text import TextStream

#: The largest random number below 1 that stays below 1 when it is multiplied in float64.
BELOW_ONE = 1 - 2**-52


@dataclass
class Sequence:
    """One prompt and what was generated from it. All tokens but the last are in the KV cache once prefilled.

    `number` is its place among the run's prompts, `slot` the one in the KV cache, once it was admitted. `luck` is its
    own, so that what is sampled does not depend on who shares the batch. Times are ns since the run's start:
    `joined_at` when its prompt was read, `first_at` and `last_at` when its first and newest tokens were emitted.
    """

    number: int
    prompt_ids: list[int]
    max_new_tokens: int
    stream: TextStream
    luck: torch.Generator = field(default_factory=torch.Generator)
    new_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    slot: int = 0
    joined_at: int = 0
    first_at: int | None = None
    last_at: int = 0

    @property
    def current(self) -> int:
        """The newest token: emitted, not yet in the KV cache."""
        return self.new_ids[-1] if self.new_ids else self.prompt_ids[-1]

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are committed."""
        return len(self.prompt_ids) + len(self.new_ids) - 1

    @property
    def remaining(self) -> int:
        return self.max_new_tokens - len(self.new_ids)

    def emitted(self, now: int) -> None:
        """A round brought tokens."""
        self.first_at = now if self.first_at is None else self.first_at
        self.last_at = now

    def since(self, position: int) -> list[int]:
        """Prompt and text as one, from token `position` on."""
        beyond = position - len(self.prompt_ids)
        return self.new_ids[beyond:] if beyond >= 0 else self.prompt_ids[position:] + self.new_ids


@dataclass
class Batch:
    """The unfinished sequences of a round, with their shared KV cache.

    `waiting` ones are admitted when a slot of the KV cache is among the `free` ones: those that finish leave theirs.
    """

    sequences: list[Sequence]
    cache: KVCache
    waiting: deque[Sequence] = field(default_factory=deque)
    free: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, sequences: list[Sequence], cache: KVCache) -> Batch:
        """All of them waiting, all slots of the cache free."""
        return cls([], cache, deque(sequences), list(reversed(range(len(cache.lengths)))))

    def admit(self) -> list[Sequence]:
        """Give free slots to waiting sequences, in their order; the newcomers' prompts are to be read next."""
        joined = []
        while self.waiting and self.free:
            joined.append(self.waiting.popleft())
            joined[-1].slot = self.free.pop()
        self.sequences += joined
        return joined

    def dismiss(self) -> None:
        """Sequences that are finished leave, and their slots are free."""
        self.free += [s.slot for s in self.sequences if s.finish_reason is not None]
        self.sequences = [s for s in self.sequences if s.finish_reason is None]

    @property
    def slots(self) -> torch.Tensor:
        return torch.tensor([s.slot for s in self.sequences])

    @property
    def starts(self) -> torch.Tensor:
        """(batch,) where the newest token of each sequence goes in the KV cache."""
        return torch.tensor([s.cached for s in self.sequences])

    @property
    def current(self) -> torch.Tensor:
        """(batch, 1) newest tokens."""
        return torch.tensor([[s.current] for s in self.sequences])

    def draft_lengths(self, k: int) -> torch.Tensor:
        """(batch,) at most k, and no more than can be emitted: a round emits one token beyond its draft."""
        return torch.tensor([min(k, s.remaining - 1) for s in self.sequences])

    def draw(self, counts: Counts[int]) -> torch.Tensor:
        """(batch, most) random numbers in [0, 1), of which counts[b] come from each sequence's own luck."""
        drawn = torch.zeros(len(counts), max(counts, default=0), dtype=torch.float64)
        for row, count, sequence in zip(drawn, counts, self.sequences, strict=True):
            row[:count] = torch.rand(count, generator=sequence.luck, dtype=torch.float64).clamp_(max=BELOW_ONE)
        return drawn
