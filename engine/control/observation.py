"""What the governor decides for a round, what it decides for, and what it learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Arm(NamedTuple):
    """What the governor decides for a round: the draft length, and whether the draft's routes start transfers."""

    k: int
    prefetch: bool

    def __str__(self) -> str:
        return f"k = {self.k}" + (" with prefetch" if self.prefetch else "")


@dataclass(frozen=True)
class Memory:
    """The offloaded side: `transfer_seconds` of one expert over the link, `slots` of the cache over all layers."""

    transfer_seconds: float
    slots: int


@dataclass(frozen=True)
class Observation:
    """What one round cost and brought. Times in seconds.

    `draft_seconds` and `verify_seconds` exclude waiting (`stall_seconds`); `seconds` is everything since the round
    before; `lengths` holds (verified, accepted) of each sequence; `tokens` were emitted by all of them.
    `wanted[r-1]` and `misses[r-1]` as LoadEstimator.observe.
    """

    k: int
    prefetch: bool
    draft_seconds: float
    verify_seconds: float
    stall_seconds: float
    seconds: float
    tokens: int
    lengths: list[tuple[int, int]]
    wanted: list[int]
    misses: list[int]

    @property
    def compute_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds

    @property
    def overhead_seconds(self) -> float:
        """All but computing and waiting."""
        return self.seconds - self.compute_seconds - self.stall_seconds
