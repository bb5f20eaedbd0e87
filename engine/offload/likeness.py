"""How alike the experts of a layer are: what one that is here says about one that is not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.offload.stream import Lease

#: Rows of a matrix that are compared: thousands of weights tell a cosine to one percent.
SAMPLE_ROWS = 64
#: Experts less alike than this say too little of each other to be computed in each other's place.
ALIKE = 0.1


class Likeness:
    """For each layer, the correlation of its experts' outputs, estimated from the weights of the first two seen.

    Experts that were trained from scratch have nothing in common (0.00 for the included model); those of a model that
    was upcycled from a dense one remain alike (0.99 with the noise that `upcycle` adds).
    """

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def known(self, layer: int) -> bool:
        """Whether two experts of `layer` were compared."""
        return layer in self._known

    def of(self, layer: int) -> float:
        """0 (too little in common to be of use, or nothing known) to 1."""
        return self._known.get(layer, 0.0)

    def compare(self, layer: int, experts: Mapping[int, Lease]) -> None:
        """Learn from the first two of `experts`, if there are two."""
        if len(experts) < 2:
            return
        one, other = list(experts.values())[:2]
        cosine = F.cosine_similarity(_sample(one), _sample(other), dim=0)
        # The output is a product of three matrices' work: gate, up and down each keep that share of the signal.
        alike = max(float(cosine), 0.0) ** 3
        self._known[layer] = alike if alike >= ALIKE else 0.0


def _sample(lease: Lease) -> torch.Tensor:
    return lease.gate_up[:SAMPLE_ROWS].float().flatten()
