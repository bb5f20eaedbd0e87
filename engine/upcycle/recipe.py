"""What the Mixture-of-Experts shall be like."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import KNOBS
from engine.errors import UsageError

EXPERTS_LIMIT = 256


@dataclass(frozen=True)
class Recipe:
    """`noise` is the standard deviation of what is added to an expert's weights, as a share of the matrix's own.

    Raises UsageError for what cannot be.
    """

    experts: int = 8
    top_k: int = 2
    noise: float = 0.06
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.experts <= EXPERTS_LIMIT:
            raise UsageError(f"{self.experts} experts are out of range: use 2 to {EXPERTS_LIMIT}")
        if not 1 <= self.top_k <= self.experts:
            raise UsageError(f"top-k {self.top_k} is out of range: use 1 to {self.experts}, the number of experts")
        if not 0 <= self.noise <= 1:
            raise UsageError(f"noise {self.noise:g} is out of range: use 0 to 1, the share of a weight's size")
        KNOBS["seed"].check(self.seed)
