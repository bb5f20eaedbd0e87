"""Which settings are possible, and which of them are worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.config import BATCH_LIMIT, K_LIMIT, draft_model_id
from engine.errors import UsageError
from engine.tune.memory import MemoryLimit
from engine.tune.setting import SOURCES, Setting

#: Drafts that are tried beside none, in the order in which they are measured: time may be short.
DRAFTS = ("sparse", "self-int4", "sparse-1", "self-int8")
BATCHES = (1, 2, 4, 8, 16)
#: Draft lengths that are measured, and the one without prefetch; those between and beyond follow from curves.
PROBED_K, PLAIN_K = (2, 8), 4


@dataclass(frozen=True)
class Fixed:
    """What the user decided; None leaves it to the search."""

    draft: str | None = None
    k: int | None = None
    batch: int | None = None
    prefetch: str | None = None

    def __post_init__(self) -> None:
        if self.draft == "none" and self.k:
            raise UsageError(f"k = {self.k} needs a draft: leave out --draft none, or --k {self.k}")
        if self.prefetch == "draft" and (self.draft == "none" or self.k == 0):
            raise UsageError("prefetch draft needs a draft: leave out --prefetch draft, or what forbids one")
        if self.prefetch == "draft" and self.draft is not None and not _routes(self.draft):
            raise UsageError(f"draft {self.draft} does not tell which experts to fetch: leave out --prefetch draft")
        if self.prefetch is not None and self.prefetch not in SOURCES:
            raise UsageError(f"tune cannot fix prefetch {self.prefetch!r}: use one of {', '.join(SOURCES)}, or auto")
        if self.k is not None and not 0 <= self.k <= K_LIMIT:
            raise UsageError(f"k {self.k} is out of range: use 0 to {K_LIMIT}, or auto")
        if self.batch is not None and not 1 <= self.batch <= BATCH_LIMIT:
            raise UsageError(f"batch {self.batch} is out of range: use 1 to {BATCH_LIMIT}, or auto")

    @property
    def drafts(self) -> list[str]:
        """Those that are allowed."""
        if self.draft is not None:
            return [self.draft]
        if self.k == 0:
            return ["none"]
        return [*DRAFTS] if self.k or self.prefetch == "draft" else ["none", *DRAFTS]

    @property
    def batches(self) -> list[int]:
        """Those that are allowed."""
        return [self.batch] if self.batch is not None else list(BATCHES)

    def sources(self, draft: str, batch: int, k: int) -> list[str]:
        """Who may foresee: the draft's routes where one sequence waits for few experts; a stream for many."""
        possible = ["none", "stream"] if batch > 1 else ["none", "draft"]
        if self.prefetch is not None:
            possible = [self.prefetch]
        return [source for source in possible if source != "draft" or (k and _routes(draft))]

    def lengths(self, draft: str) -> list[int]:
        """Draft lengths that are allowed."""
        if self.k is not None:
            return [self.k]
        return [0] if draft == "none" else list(range(1, K_LIMIT + 1))


def _routes(draft: str) -> bool:
    """Whether it routes through the target's own layers."""
    return draft not in ("none", "ngram") and draft_model_id(draft) is None


def settings(fixed: Fixed, memory: MemoryLimit) -> Iterator[Setting]:
    """Every setting that the user and the memory allow. Raises BudgetError when there is none."""
    found = False
    for draft in fixed.drafts:
        for batch in fixed.batches:
            if not memory.fits(draft, batch):
                continue
            for k in fixed.lengths(draft):
                for source in fixed.sources(draft, batch, k):
                    found = True
                    yield Setting(draft, k, batch, source, memory.slots(draft, batch))
    if not found:
        raise memory.refusal(fixed.drafts, fixed.batches)


def probes(fixed: Fixed, memory: MemoryLimit) -> list[Setting]:
    """The settings to measure, draft by draft: enough for a curve over whatever is not fixed.

    All of a draft have the slots that its largest batch leaves, so that it is loaded once: loading takes as long as
    measuring.
    """
    allowed = list(settings(fixed, memory))
    largest: dict[str, int] = {}
    for setting in allowed:
        largest[setting.draft] = max(setting.batch, largest.get(setting.draft, 1))
    return [
        replace(s, slots=memory.slots(s.draft, largest[s.draft]))
        for s in allowed
        if s.batch in (1, largest[s.draft]) and _telling(s, fixed)
    ]


def _telling(setting: Setting, fixed: Fixed) -> bool:
    """Whether to measure it. Without prefetch, one length shows what changes; in a batch, only without a draft."""
    if setting.draft == "none" or (fixed.k is not None and fixed.prefetch is not None):
        return True
    plain = setting.prefetch == "none" and fixed.prefetch is None
    if plain and setting.batch > 1:
        return False
    return fixed.k is not None or setting.k in ((PLAIN_K,) if plain else PROBED_K)
