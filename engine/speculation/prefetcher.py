"""Turning foreseen routes into transfers, in the order in which the verification will need them."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

from engine.offload.cache import ExpertCache
from engine.speculation.conveyor import Conveyor
from engine.speculation.lookahead import Demand, LookaheadBuffer

# Prefetches on the link at a time. A transfer, once issued, has evicted somebody; issuing late keeps that
# decision open until more of the lookahead buffer is known, and two keep the link busy without a gap.
IN_FLIGHT = 2
#: When the draft's routes become transfers: at once, when the draft is done, or at once unless that evicts an expert
#: that the rest of the draft will probably want.
TIMINGS = ("early", "late", "adaptive")

# The next layer's router applied to this layer's hidden states: (rows, H) → index, weights (rows, top_k).
RouteGuess = Callable[[int, torch.Tensor], tuple[list[list[int]], list[list[float]]]]


class Prefetcher:
    """Feeds the link with experts that are wanted and not resident, earliest layer first.

    `source` says who foresees: "draft" (the lookahead buffer that the draft's routers fill), "next-layer" (the
    next layer's router applied to this layer's input), "stream" (what most passes want, see `Conveyor`) or "none";
    `timing`, one of TIMINGS, when the draft's routes
    become transfers. Prefetching is advisory: what it does not manage is a demand miss, never another expert.
    """

    def __init__(self, cache: ExpertCache, layers: int, guess: RouteGuess | None) -> None:
        self.buffer = LookaheadBuffer(layers)
        self.source = "draft"
        self.timing = "adaptive"
        self._depth = layers
        self._conveyor = Conveyor(cache, layers)
        self._cache = cache
        self._layers = layers
        self._guess = guess
        self._demand = Demand(layers)
        self._todo: list[tuple[int, float, int]] = []
        self._rows_left = 0
        #: Layers without a slot for one more prefetch, and what waits for one until the next row.
        self._full: set[int] = set()
        self._waiting: list[tuple[int, float, int]] = []

    @property
    def depth(self) -> int:
        """How many layers ahead of the decoder experts may be fetched."""
        return self._depth

    @depth.setter
    def depth(self, layers: int) -> None:
        self._depth = self._conveyor.depth = layers

    def begin_round(self, rows: int) -> None:
        """Forget the last round's plan; what is still on the link and unwanted will be cancelled.

        The draft will route `rows` rows, and the verification one more.
        """
        self.buffer.clear()
        self._todo.clear()
        self._waiting.clear()
        self._rows_left = rows + 1
        # The plan grows while the draft runs, so that no prefetch evicts what an earlier row wants.
        self._cache.plan(self.buffer.plan if self.source == "draft" else None)

    def drafted(self, layer: int, index: list[list[int]], weights: list[list[float]]) -> None:
        """The draft routed one more row at `layer`. Where layers stream it says nothing new."""
        if self.source == "stream":
            return
        self._demand.add(layer, {expert for row in index for expert in row})
        fresh = self.buffer.add(layer, index, weights)
        if layer == 0:
            self._rows_left -= 1
            self._retry()
        if self.source == "draft":
            self._enqueue(layer, fresh)
            if self.timing != "late":
                self._pump(0)

    def plan_complete(self) -> None:
        """The draft is done: stop transfers that the chunk does not need after all, and go on with the others."""
        self._rows_left = 0
        self._retry()
        if self.source == "draft" and len(self.buffer):
            self._cache.cancel_unplanned()
            self._pump(0)

    def reached(self, layer: int, index: list[list[int]]) -> None:
        """A pass of the target, also one that reads prompts, is about to compute `layer` for rows with this choice."""
        experts = {expert for row in index for expert in row}
        self._conveyor.learn(layer, experts)
        if self.source == "stream":
            self._conveyor.reached(layer, experts)

    def passed(self) -> None:
        """A pass of the target is over."""
        if self.source == "stream":
            self._conveyor.passed()

    def verifying(self, layer: int, hidden: torch.Tensor) -> None:
        """The target is about to compute `layer` for `hidden` (rows, H)."""
        ahead = layer + 1
        if self.source == "next-layer" and self._guess is not None and ahead < self._layers:
            self._enqueue(ahead, self.buffer.add(ahead, *self._guess(ahead, hidden)))
        # Slots come free behind the decoder only: the earliest layer gets them, or nobody does.
        self._retry()
        self._pump(ahead, most_full=1)

    def _pump(self, first_layer: int, most_full: int | None = None) -> None:
        """Issue transfers for layers from `first_layer` on, as far as link and slots have room.

        With `most_full`, give up once so many layers have no slot for one.
        """
        while self._todo and self._cache.prefetching < IN_FLIGHT:
            layer, _, expert = self._todo[0]
            if layer >= first_layer + self._depth:
                return
            if layer < first_layer or self._cache.has(layer, expert):
                heapq.heappop(self._todo)
            elif layer in self._full:
                self._waiting.append(heapq.heappop(self._todo))
            elif self._cache.prefetch(layer, expert, layer, self._keep(layer)):
                heapq.heappop(self._todo)
            else:
                self._full.add(layer)
                if most_full is not None and len(self._full) >= most_full:
                    return

    def _keep(self, layer: int) -> set[int]:
        """What the rest of the draft will probably want, and no prefetch should evict."""
        return self._demand.likely(layer, self._rows_left) if self.timing == "adaptive" else set()

    def _retry(self) -> None:
        """What found no slot may find one now."""
        self._full.clear()
        for entry in self._waiting:
            heapq.heappush(self._todo, entry)
        self._waiting.clear()

    def _enqueue(self, layer: int, experts: dict[int, float]) -> None:
        for expert, weight in experts.items():
            heapq.heappush(self._todo, (layer, -weight, expert))
