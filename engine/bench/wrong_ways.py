"""Engines made worse on purpose, to see what a decision is worth. No engine outside of a bench does this."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.engine import Engine
from engine.model.kv_cache import KVCache
from engine.offload.experts import QuantizedExperts
from engine.speculation.batch import Batch
from engine.speculation.drafters import Draft, Drafter


@contextmanager
def timing(engine: Engine, name: str) -> Iterator[None]:
    """Prefetches at another time (one of `TIMINGS`)."""
    engine.prefetcher.timing, before = name, engine.prefetcher.timing
    try:
        yield
    finally:
        engine.prefetcher.timing = before


@contextmanager
def corrupted_predictions(engine: Engine, share: float) -> Iterator[None]:
    """Of the experts that the draft foresees, each is replaced by a random one with probability `share`.

    The draft itself computes with the right ones: only the prefetcher is misled.
    """
    generator = random.Random(0)
    experts, drafted = engine.cache.table.experts, engine.prefetcher.drafted

    def misled(layer: int, index: list[list[int]], weights: list[list[float]]) -> None:
        wrong = [
            [generator.randrange(experts) if generator.random() < share else expert for expert in row] for row in index
        ]
        drafted(layer, wrong, weights)

    engine.prefetcher.drafted = misled  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.prefetcher.drafted  # the method of the class shows again


@contextmanager
def separate_kv(engine: Engine) -> Iterator[None]:
    """The draft keeps keys and values of its own, computed with its own experts."""
    create = engine._create_drafter
    experts = QuantizedExperts(engine.loaded.draft_experts, _Nobody())

    def created(*arguments: Any) -> Drafter:
        return SeparateKV(create(*arguments), engine, experts)

    engine._create_drafter = created  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del engine._create_drafter  # the method of the class shows again


class _Nobody:
    """An observer of layers that has no use for what it hears."""

    def routed(self, layer: int, index: list[list[int]], weights: list[list[float]], hidden: torch.Tensor) -> None:
        pass

    def computed(self, layer: int, rows: int) -> None:
        pass


class SeparateKV(Drafter):
    """Another drafter on a KV cache of its own, which it fills with `experts` where it lacks tokens.

    It lacks the prompt at first, and the last draft token after a round that accepted all of them.
    """

    def __init__(self, inner: Drafter, engine: Engine, experts: QuantizedExperts) -> None:
        self.nbytes, self.routes = inner.nbytes, inner.routes
        self._inner = inner
        self._runner = engine.loaded.runner
        self._experts = experts
        self._kv: KVCache | None = None
        #: Tokens of each sequence slot that it has, if they are accepted.
        self._has: dict[int, int] = {}

    def draft(self, batch: Batch, k: int, on_token: Callable[[int], None]) -> Draft:
        if self._kv is None:
            self._kv = self._runner.new_cache(len(batch.cache.lengths), batch.cache.max_length)
        for sequence in batch.sequences:
            ids = [*sequence.prompt_ids, *sequence.new_ids]
            start = min(self._has.get(sequence.slot, 0), sequence.cached)
            missing = torch.tensor([ids[start : sequence.cached]])
            if missing.numel():
                slot, at, rows = (torch.tensor([n]) for n in (sequence.slot, start, missing.shape[1]))
                self._runner.forward(self._kv, self._experts, missing, slot, at, rows, keep=1)
        draft = self._inner.draft(Batch(batch.sequences, self._kv), k, on_token)
        for sequence, length in zip(batch.sequences, draft.lengths.tolist(), strict=True):
            self._has[sequence.slot] = sequence.cached + length
        return draft
