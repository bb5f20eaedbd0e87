"""Drafting with what is there: resident experts, in the place of absent ones as far as they are alike."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from engine.errors import Cancelled
from engine.model.seams import ExpertsModule
from engine.offload.cache import ExpertCache
from engine.offload.experts import LayerObserver, gate_scores
from engine.offload.groups import KernelRowGroups, RowGroups
from engine.offload.likeness import Likeness

#: Stands in a row's choice where no expert computes.
ABSENT = -1
#: From here on it hardly matters which expert computes: the tokens of a batch share theirs. Of the upcycled 8 × 135M,
#: 0.99 alike, reading one or two experts of a layer instead of all four that are there.
SAME = 0.95


class ResidentExperts:
    """The draft's experts: of those that the router chose for a token, the likeliest `most` that are resident.

    What the others would have added is guessed from how alike a layer's experts are: an estimate by those that do
    compute (`share_of_the_rest`), and where the experts are alike at all, other resident ones fill up to `most`. With
    nothing to go by the token passes the layer on the residual path and shared experts alone. Tokens a round, k = 4,
    half of the experts resident: of the included model, whose experts have nothing in common, 3.43, where stand-ins at
    full weight would make 2.91; of the upcycled 8 × 135M 4.41, and 1.73 with a token's own experts alone.

    Nothing is requested of the cache: no transfer starts, and no expert is held longer than its layer takes.
    """

    #: Bytes of fast memory beyond the cache's.
    nbytes = 0

    def __init__(self, cache: ExpertCache, observer: LayerObserver, most: int, native: bool) -> None:
        self._cache = cache
        self._observer = observer
        self._most = most
        self._groups = KernelRowGroups if native else RowGroups
        self._likeness = Likeness()
        self.stop: threading.Event | None = None

    def run(
        self, layer: int, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H). Raises Cancelled."""
        if self.stop is not None and self.stop.is_set():
            raise Cancelled("stopped")
        routes, gates = index.tolist(), weights.tolist()
        # First, because it may prefetch, and so evict: what is lent out could not make room.
        self._observer.routed(layer, routes, gates, hidden)
        with self._cache.lend(layer, self._useful(layer, routes)) as leases:
            if not self._likeness.known(layer):
                self._likeness.compare(layer, leases)
            alike, here = self._likeness.of(layer), list(leases)
            if len(routes) > 1 and alike >= SAME and here:
                kept = self._share(routes, gates, here, alike)
            else:
                kept = [self._keep(*row, here, alike) for row in zip(routes, gates, strict=True)]
            groups = self._groups(hidden, [[expert for expert, _ in row] for row in kept])
            if ABSENT in groups.members:
                groups.put(ABSENT, hidden.new_zeros(len(groups.members[ABSENT][0]), hidden.shape[1]))
            chosen = [leases[expert] for expert in groups.members if expert != ABSENT]
            if chosen:
                groups.compute(module, chosen)
            out = groups.combine(weights.new_tensor([[gate for _, gate in row] for row in kept]))
        self._observer.computed(layer, len(routes))
        return out

    def _useful(self, layer: int, routes: list[list[int]]) -> Iterable[int]:
        """The experts to borrow: the tokens' own, and all others where one may stand in for another."""
        if self._likeness.known(layer) and not self._likeness.of(layer):
            return {expert for row in routes for expert in row}
        return range(self._cache.table.experts)

    def _share(
        self, routes: list[list[int]], gates: list[list[float]], here: list[int], alike: float
    ) -> list[list[tuple[int, float]]]:
        """As many of `here` as a token takes, the same for all: a batch reads no more than one token does."""
        scores = gate_scores(routes, gates)
        chosen = sorted(here, key=lambda expert: -scores.get(expert, 0.0))[: min(self._most, len(routes[0]))]
        share = share_of_the_rest(alike, len(chosen))
        kept = []
        for experts, values in zip(routes, gates, strict=True):
            own = dict(zip(experts, values, strict=True))
            left_out = share * (sum(values) - sum(own.get(expert, 0.0) for expert in chosen))
            kept.append([(expert, own.get(expert, 0.0) + left_out) for expert in chosen])
        return kept

    def _keep(self, experts: list[int], gates: list[float], here: list[int], alike: float) -> list[tuple[int, float]]:
        """What computes for a token, with its weights: its likeliest experts `here`, then others; ABSENT fills up."""
        most = min(self._most, len(experts))
        ranked = sorted(zip(gates, experts, strict=True), reverse=True)
        kept = [(expert, gate) for gate, expert in ranked if expert in here][:most]
        left_out = sum(gates) - sum(gate for _, gate in kept)
        if alike and len(kept) < most:
            # Any will do: they are about equally like the absent one. The same for all tokens: read once.
            kept += [(expert, 0.0) for expert in here if expert not in experts][: most - len(kept)]
        share = left_out * share_of_the_rest(alike, len(kept))
        return [(expert, gate + share) for expert, gate in kept] + [(ABSENT, 0.0)] * (most - len(kept))


def share_of_the_rest(alike: float, computed: int) -> float:
    """The weight of each of `computed` outputs in the best linear estimate of one that is not computed.

    For outputs of equal size that all correlate by `alike`: with 1 the mean of the computed ones, with 0 nothing.
    """
    return alike / (1 + (computed - 1) * alike) if computed else 0.0
