"""Layers that stream through a cache: what is loaded, in which order, and that a pass never waits for a free slot."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.model.layout import ExpertRecord, ExpertShape, ExpertTable, Segment
from engine.offload.cache import ExpertCache
from engine.offload.links import Link
from engine.speculation.conveyor import Conveyor

LAYERS, EXPERTS = 5, 6


class Memory:
    """A source whose experts are zeros; it remembers which were read, in order."""

    def __init__(self) -> None:
        shape = ExpertShape(8, 4, torch.float32)
        nothing = Segment(Path("nowhere"), 0, shape.nbytes)
        self.table = ExpertTable(
            shape, tuple(tuple(ExpertRecord(i, e, (nothing,)) for e in range(EXPERTS)) for i in range(LAYERS))
        )
        self.dtype, self.expert_nbytes = torch.float32, shape.nbytes
        self.reads: list[tuple[int, int]] = []

    def path(self, layer: int, expert: int) -> Path:
        return Path("nowhere")

    def read(self, layer: int, expert: int, offset: int, out: torch.Tensor) -> None:
        self.reads.append((layer, expert))
        out.zero_()

    def close(self) -> None:
        pass


class OneByOne(Link):
    """One worker and one chunk an expert: the order on the link is the order of reads."""

    label, bytes_per_s = "test", 1e9

    def _chunk_nbytes(self) -> int:
        return self.source.expert_nbytes


class World:
    """A decoder that walks its layers over a cache of `slots` experts and has a conveyor ahead of it."""

    def __init__(self, slots: int, streaming: bool = True) -> None:
        self.source = Memory()
        per_layer, extra = divmod(slots, LAYERS)
        self.link = OneByOne(self.source, 1)
        self.cache = ExpertCache(self.source.table, per_layer, torch.float32, self.link, extra=extra)
        self.cache.set_streaming(streaming)
        self.conveyor = Conveyor(self.cache, LAYERS)
        self.streaming = streaming

    def walk(self, wanted: Callable[[int], list[int]] = lambda layer: list(range(EXPERTS))) -> None:
        """One pass; each transfer that was asked for is let in before the next layer, as if computing took long."""
        for layer in range(LAYERS):
            self.conveyor.learn(layer, wanted(layer))
            if self.streaming:
                self.conveyor.reached(layer, wanted(layer))
            for lease in self.cache.stream(layer, wanted(layer)):
                assert not lease.gate_up.any()
            self.idle()
        if self.streaming:
            self.conveyor.passed()
        self.idle()

    def idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.cache.prefetching:
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def steady(self, passes: int = 4) -> int:
        """Loads a pass once all has settled."""
        for _ in range(3):
            self.walk()
        before = self.cache.stats.bytes_loaded
        for _ in range(passes):
            self.walk()
        loads, rest = divmod(self.cache.stats.bytes_loaded - before, passes * self.source.expert_nbytes)
        assert rest == 0, "every pass loads the same"
        return loads


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*arguments) -> World:
        made.append(World(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.cache.close()
        one.link.close()


@pytest.mark.parametrize("slots", (10, 13, 15, 17, 20, 25, 30))
def test_a_pass_loads_what_no_layer_keeps_and_misses_nothing(slots: int, world):
    """All but the spare slots keep theirs for ever: L × E − (slots − spare) loads a pass, each of them foreseen."""
    one = world(slots)
    spare = min(math.ceil(2 * (LAYERS * EXPERTS - slots) / (LAYERS - 2)), slots - LAYERS)
    assert one.steady() == LAYERS * EXPERTS - (slots - spare)
    before = one.cache.stats
    one.walk()
    after = one.cache.stats
    assert after.misses == before.misses
    assert after.requests - before.requests == LAYERS * EXPERTS


def test_transfers_come_in_the_decoder_s_order(world):
    one = world(15)
    one.steady()
    start = len(one.source.reads)
    for _ in range(3):
        one.walk()
    layers = [layer for layer, _ in one.source.reads[start:]]
    # What is fetched in a pass's end is the next one's beginning; one read follows the other round the circle.
    steps = [(b - a) % LAYERS for a, b in zip(layers, layers[1:], strict=False)]
    assert set(steps) <= {0, 1} and sum(steps) >= 2 * LAYERS


def test_nothing_is_loaded_twice_in_a_pass(world):
    one = world(12)
    one.steady()
    start = len(one.source.reads)
    one.walk()
    reads = one.source.reads[start:]
    assert len(reads) == len(set(reads))


def test_rarely_wanted_experts_are_left_to_demands(world):
    """Expert 5 of each layer is wanted in every other pass: no guess is made, and none is wrong."""
    one = world(15)
    wasted = []
    for turn in range(16):
        one.walk(lambda layer, odd=turn % 2: list(range(EXPERTS - odd)))
        wasted.append(one.cache.stats.prefetch_wasted)
    assert wasted[-1] == wasted[6], "by then it is known"
    assert {expert for _, expert in one.source.reads[-3 * EXPERTS * LAYERS :]} == set(range(EXPERTS))


def test_the_next_run_starts_from_what_is_there(world):
    """A run that ends takes its transfers back: the conveyor asks again."""
    one = world(15)
    one.steady()
    one.cache.settle()
    one.cache.resize(2)
    one.walk()
    misses = one.cache.stats.misses
    one.walk()
    assert one.cache.stats.misses == misses


def test_depth_bounds_how_far_it_reaches(world):
    one = world(20)
    one.conveyor.depth = 1
    for _ in range(3):
        one.walk()
    start = len(one.source.reads)
    one.conveyor.reached(0, range(EXPERTS))
    one.idle()
    assert {layer for layer, _ in one.source.reads[start:]} <= {0, 1}
