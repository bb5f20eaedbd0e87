"""Turning foreseen routes into transfers, in the order in which the verification will need them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

from engine.offload.cache import ExpertCache
from engine.speculation.lookahead import LookaheadBuffer

# Prefetches on the link at a time. A transfer, once issued, has evicted somebody; issuing late keeps that
# decision open until more of the lookahead buffer is known, and two keep the link busy without a gap.
IN_FLIGHT = 2

# The next layer's router applied to this layer's hidden states: (rows, H) → index, weights (rows, top_k).
RouteGuess = Callable[[int, torch.Tensor], tuple[list[list[int]], list[list[float]]]]


class Prefetcher:
    """Feeds the link with experts that are wanted and not resident, earliest layer first.

    `source` says who foresees: "draft" (the lookahead buffer that the draft's routers fill), "next-layer" (the
    next layer's router applied to this layer's input) or "none". Prefetching is advisory: what it does not
    manage is a demand miss, never another expert.
    """

    def __init__(self, cache: ExpertCache, layers: int, guess: RouteGuess | None) -> None:
        self.buffer = LookaheadBuffer(layers)
        self.source = "draft"
        self.depth = layers
        self._cache = cache
        self._layers = layers
        self._guess = guess
        self._todo: list[tuple[int, float, int]] = []

    def begin_round(self) -> None:
        """Forget the last round's plan; what is still on the link and unwanted will be cancelled."""
        self.buffer.clear()
        self._todo.clear()
        # The plan grows while the draft runs, so that no prefetch evicts what an earlier row wants.
        self._cache.plan(self.buffer.plan if self.source == "draft" else None)

    def drafted(self, layer: int, index: list[list[int]], weights: list[list[float]]) -> None:
        """The draft routed one more row at `layer`."""
        fresh = self.buffer.add(layer, index, weights)
        if self.source == "draft":
            self._enqueue(layer, fresh)
            self.pump(0)

    def plan_complete(self) -> None:
        """The draft is done: stop transfers that the chunk does not need after all, and go on with the others."""
        if self.source == "draft" and len(self.buffer):
            self._cache.cancel_unplanned()
            self.pump(0)

    def verifying(self, layer: int, hidden: torch.Tensor) -> None:
        """The target is about to compute `layer` for `hidden` (rows, H)."""
        ahead = layer + 1
        if self.source == "next-layer" and self._guess is not None and ahead < self._layers:
            self._enqueue(ahead, self.buffer.add(ahead, *self._guess(ahead, hidden)))
        self.pump(ahead)

    def pump(self, first_layer: int) -> None:
        """Issue transfers for layers from `first_layer` on, as far as the link has room."""
        while self._todo and self._cache.prefetching < IN_FLIGHT:
            layer, _, expert = self._todo[0]
            if layer >= first_layer + self.depth:
                return
            heapq.heappop(self._todo)
            if layer >= first_layer:
                self._cache.prefetch(layer, expert, layer)

    def _enqueue(self, layer: int, experts: dict[int, float]) -> None:
        for expert, weight in experts.items():
            heapq.heappush(self._todo, (layer, -weight, expert))
