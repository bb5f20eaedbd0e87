"""Streaming whole layers: what the decoder comes to next is always on the link (double buffer)."""

from __future__ import annotations

from collections.abc import Collection

from engine.offload.cache import ExpertCache
from engine.speculation.lookahead import Demand

#: Fetched ahead is what this share of the last passes wanted. The link is busy in any case, so that a wrong guess
#: costs a transfer and a miss costs nothing but its place in the queue.
SURE = 0.8


class Conveyor:
    """Prefetches the experts that coming layers will probably want, pass after pass (SpecMoEOff, section 5).

    A large batch wants nearly every expert in every pass, so nobody has to draft to know what comes next. A decoder
    walks its layers in a circle, where a fixed set of residents is the best that a cache can keep (Belady): the other
    experts pass through a few slots that layers lend each other, in the decoder's order, and beyond its last layer
    those of the first one follow. So the link has work while a draft computes, too.
    """

    def __init__(self, cache: ExpertCache, layers: int) -> None:
        self.depth = layers
        self._cache = cache
        self._layers = layers
        self._all = range(cache.table.experts)
        self._demand = Demand(layers)
        #: Where the decoder is, and the first layer of which not everything was asked for; both count on for ever.
        self._at = self._next = 0

    def learn(self, layer: int, experts: Collection[int]) -> None:
        """A pass wants `experts` of `layer`."""
        self._demand.add(layer, experts)

    def reached(self, layer: int, experts: Collection[int]) -> None:
        """A pass is about to request `experts` of `layer`: fill the slots that have come free behind it."""
        self._at += (layer - self._at) % self._layers
        self._fill(experts)

    def passed(self) -> None:
        """A pass is over, and the next one begins with the first layer."""
        self._at += -self._at % self._layers
        # From here on it is looked at again: a run that ended, or fewer slots, may have taken away what was there.
        self._next = self._at
        self._fill(self._demand.wanted_by(0, SURE))

    def _fill(self, now: Collection[int]) -> None:
        """Ask for what is absent, layer by layer, while there are slots. `now` is what the first layer wants.

        That goes first even if the layer was asked for before: who was not foreseen would otherwise take the slot of
        somebody who was, further ahead.
        """
        self._cache.approach(self._at % self._layers)
        self._next = max(self._next, self._at + 1)
        if not self._ask(self._at, now):
            return
        while self._next <= self._at + min(self.depth, self._layers - 1):
            if not self._ask(self._next, self._demand.wanted_by(self._next % self._layers, SURE)):
                return
            self._next += 1

    def _ask(self, at: int, experts: Collection[int]) -> bool:
        """Whether all of `experts`, of the layer that is `at`, are there or on their way now."""
        layer = at % self._layers
        for expert in experts:
            # Into lent slots only: among a layer's own residents one is worth as much as another.
            if not self._cache.has(layer, expert) and not self._cache.prefetch(layer, expert, at, self._all):
                return False
        return True
