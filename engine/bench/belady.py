"""The least that any eviction policy must load: Belady's choice, with all requests known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.engine import Engine
from engine.offload.stream import ExpertStream

#: One pass through a layer: the layer, and the distinct experts that it needs.
Request = tuple[int, tuple[int, ...]]


class RequestLog:
    """What engines asked of their caches while it listened, and how often that was missing."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.misses = 0

    @contextmanager
    def listen(self, engine: Engine) -> Iterator[None]:
        """Listen to an engine whose cache is emptied now or was empty before."""
        cache, stream = engine.cache, engine.cache.stream

        def logged(layer: int, experts: Sequence[int], *rest: Any, **options: Any) -> ExpertStream:
            self.requests.append((layer, tuple(dict.fromkeys(experts))))
            return stream(layer, experts, *rest, **options)

        cache.stream = logged  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.misses += cache.stats.misses
            del cache.stream  # the method of the class shows again


def belady_loads(requests: Sequence[Request], slots: int) -> int:
    """Loads that serve `requests`, in order, with `slots` experts of whatever layers at most kept in between.

    An expert that is not kept is loaded, used and forgotten. Keeping those that are needed again soonest is best
    (Belady, 1966), so no policy, nor any way of sharing slots between layers, needs fewer loads.
    """
    uses: dict[tuple[int, int], list[int]] = {}
    for at, (layer, experts) in enumerate(requests):
        for expert in experts:
            uses.setdefault((layer, expert), []).append(at)
    for times in uses.values():
        times.reverse()  # the next one last
    kept: set[tuple[int, int]] = set()
    loads = 0
    for layer, experts in requests:
        wanted = {(layer, expert) for expert in experts}
        loads += len(wanted - kept)
        for pair in wanted:
            uses[pair].pop()
        kept = {pair for pair in kept | wanted if uses[pair]}
        if len(kept) > slots:
            kept = set(sorted(kept, key=lambda pair: uses[pair][-1])[:slots])
    return loads
