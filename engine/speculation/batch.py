"""The sequences that one step serves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.model.kv_cache import KVCache
from engine.model.text import TextStream


@dataclass
class Sequence:
    """One prompt and what was generated from it. All tokens but the last are in the KV cache once prefilled."""

    slot: int
    prompt_ids: list[int]
    max_new_tokens: int
    stream: TextStream
    new_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

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

    def since(self, position: int) -> list[int]:
        """Prompt and text as one, from token `position` on."""
        beyond = position - len(self.prompt_ids)
        return self.new_ids[beyond:] if beyond >= 0 else self.prompt_ids[position:] + self.new_ids


@dataclass
class Batch:
    """The unfinished sequences of a round, with their shared KV cache."""

    sequences: list[Sequence]
    cache: KVCache

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
