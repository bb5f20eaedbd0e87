"""What `tune` chooses between, and what it runs with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.errors import UsageError

#: What may say what to fetch ahead in a round whose source is fixed; "auto" is the governor's.
SOURCES = ("none", "draft", "stream")


@dataclass(frozen=True)
class Setting:
    """`batch` sequences of which each drafts `k` tokens, with `slots` experts in the cache, of all layers together."""

    draft: str
    k: int
    batch: int
    prefetch: str
    slots: int

    def __post_init__(self) -> None:
        if self.k and self.draft == "none":
            raise UsageError(f"k = {self.k} needs a draft: give --draft, or --k 0")
        if self.prefetch == "draft" and not self.k:
            raise UsageError("prefetch draft needs a draft: give --k 1 or more, or another --prefetch")

    @property
    def family(self) -> tuple[str, str]:
        """Settings of one family compute and fetch alike: they differ in how much."""
        return self.draft, self.prefetch

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.draft}, k = {self.k}, batch {self.batch}, prefetch {self.prefetch}"

    def engine(self, config: EngineConfig, stored_bytes: int) -> EngineConfig:
        """`config` with this setting's draft, prefetch and cache; `stored_bytes` are those of one expert."""
        cache = CacheBudget(nbytes=self.slots * stored_bytes)
        return dataclasses.replace(config, draft=self.draft, policy="lookahead", prefetch=self.prefetch, cache=cache)

    def generation(self, max_new_tokens: int) -> GenerationConfig:
        """At temperature 0."""
        return GenerationConfig(max_new_tokens=max_new_tokens, k=self.k, batch=self.batch)
