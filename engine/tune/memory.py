"""How a limit on fast memory is split between draft, keys and values, and the cache."""

from __future__ import annotations

import copy
import dataclasses
import math

from engine.bench.memory_split import Split, split_memory
from engine.config import CacheBudget, EngineConfig
from engine.doctor import fast_memory
from engine.errors import BudgetError


class MemoryLimit:
    """`budget` is a share of the experts' bytes, or bytes, for draft, cache, and KV of `tokens` a sequence.

    What the draft and the KV leave is the cache's: an expert more is never slower. Weights that are not experts
    come on top, as everywhere.
    """

    def __init__(self, config: EngineConfig, budget: CacheBudget, kv_bytes_per_token: int, tokens: int) -> None:
        self._config = config
        self._sequence = kv_bytes_per_token * tokens
        self._splits: dict[str, Split] = {}
        whole = self.split("none")
        self.expert_bytes, self.stored_bytes, self.layers = whole.expert_bytes, whole.stored_bytes, whole.layers
        self.experts = whole.expert_bytes // whole.stored_bytes
        self.slot_bytes = _slot_bytes(config)
        self.limit = budget.nbytes or round((budget.share or 0.0) * whole.expert_bytes)

    def limited(self, nbytes: int) -> MemoryLimit:
        """The same with another limit."""
        other = copy.copy(self)
        other.limit = nbytes
        return other

    def split(self, draft: str) -> Split:
        """Of all the experts' bytes, beside that draft."""
        if draft not in self._splits:
            self._splits[draft] = split_memory(self._config, draft, 1.0)
        return self._splits[draft]

    def draft_bytes(self, draft: str) -> int:
        """What the draft takes, in whole slots."""
        split = self.split(draft)
        return (split.limit_slots - split.slots) * self.slot_bytes

    def kv_bytes(self, batch: int) -> int:
        """Keys and values of `batch` sequences."""
        return batch * self._sequence

    def slots(self, draft: str, batch: int) -> int:
        """Experts that the cache may hold, of all layers; fewer than layers (negative, too) is no cache."""
        left = self.limit - self.draft_bytes(draft) - self.kv_bytes(batch)
        return min(left // self.slot_bytes, self.experts)

    def fits(self, draft: str, batch: int) -> bool:
        """Whether each layer gets a slot."""
        return self.slots(draft, batch) >= self.layers

    def needed(self, draft: str, batch: int) -> int:
        """Bytes with which it would fit."""
        return self.draft_bytes(draft) + self.kv_bytes(batch) + self.layers * self.slot_bytes

    def refusal(self, drafts: list[str], batches: list[int]) -> BudgetError:
        """The error that says what would fit, of these."""
        draft, batch = min(((d, b) for d in drafts for b in batches), key=lambda pair: self.needed(*pair))
        least = math.ceil(self.needed(draft, batch) / 2**20)
        return BudgetError(
            f"{self.limit / 2**20:.1f} MiB hold no draft, KV and an expert of each layer: the least that fits is "
            f"--memory {least}MiB (draft {draft}, batch {batch})"
        )


def _slot_bytes(config: EngineConfig) -> int:
    """Bytes of fast memory for one expert, a page more than it has at most."""
    plan = fast_memory(dataclasses.replace(config, draft="none", cache=CacheBudget(share=1.0)))
    return plan["memory"]["cache"] // (plan["moe_layers"] * plan["experts"])
