"""Noticing that a drafter is hopeless."""

from __future__ import annotations

import math
from collections.abc import Iterable


class DraftWatch:
    """Wald's sequential test (1945) of whether the target ever accepts a draft's first token.

    A drafter whose first token is right with probability USEFUL or more is given up wrongly with probability ERROR
    at most, however often one looks; one that is never right is given up at its 31st first token. Only first tokens
    count: later ones are only reached behind right ones. What pays between the two is the governor's to decide.
    """

    USEFUL, USELESS, ERROR = 0.15, 0.01, 0.01

    def __init__(self) -> None:
        self.tried = self.right = 0

    def observe(self, lengths: Iterable[tuple[int, int]]) -> None:
        """(verified, accepted) draft tokens of each sequence in a round."""
        for verified, accepted in lengths:
            self.tried += verified > 0
            self.right += accepted > 0

    @property
    def hopeless(self) -> bool:
        wrong = self.tried - self.right
        evidence = self.right * math.log(self.USEFUL / self.USELESS)
        evidence += wrong * math.log((1 - self.USEFUL) / (1 - self.USELESS))
        return evidence < math.log(self.ERROR)
