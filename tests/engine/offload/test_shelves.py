"""Slots that layers lend each other: how many, to whom, and that nothing planned is lost by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from one_by_one import OneByOne

from engine.config import CacheBudget
from engine.offload.cache import ExpertCache

LAYERS = 4


@pytest.fixture
def make_cache(make_source) -> Iterator[Callable[..., ExpertCache]]:
    made: list[ExpertCache] = []

    def make(slots: int, policy: str = "lookahead", **kwargs) -> ExpertCache:
        source = make_source(LAYERS, 6, intermediate=4, hidden=8)
        made.append(ExpertCache(source.table, slots, torch.float32, OneByOne(source, 1), policy, **kwargs))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
        cache.link.close()


def walk(cache: ExpertCache, layer: int, experts: list[int]) -> None:
    for lease in cache.stream(layer, experts, dict.fromkeys(experts, 1.0)):
        assert lease.expert in experts


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def arrive(cache: ExpertCache, layer: int, expert: int) -> None:
    assert cache.prefetch(layer, expert, layer)
    eventually(lambda: expert in cache.resident()[layer])


@pytest.mark.parametrize(("slots", "extra"), [(1, 0), (1, 3), (2, 0), (2, 1), (3, 2), (5, 3), (6, 0)])
def test_all_layers_together_never_hold_more(make_cache, slots: int, extra: int) -> None:
    cache = make_cache(slots, extra=extra)
    for _ in range(3):
        for layer in range(LAYERS):
            walk(cache, layer, [0, 1, 2, 3, 4, 5])
            assert sum(map(len, cache.resident())) <= slots * LAYERS + extra
            assert cache.nbytes <= cache.capacity_nbytes
    assert cache.nbytes == cache.capacity_nbytes  # and they use all of it
    assert all(cache.resident())


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_policies_that_do_not_look_ahead_keep_to_their_layers(make_cache, policy: str) -> None:
    cache = make_cache(2, policy, extra=3)
    for layer in range(LAYERS):
        walk(cache, layer, [0, 1, 2, 3])
    assert [len(experts) for experts in cache.resident()] == [3, 3, 3, 2]  # 3 extra ones
    assert cache.capacity_nbytes == cache.nbytes


def test_a_draft_fills_the_first_layers_with_slots_of_the_last(make_cache) -> None:
    cache = make_cache(2)
    for layer in range(LAYERS):
        walk(cache, layer, [0, 1])
    assert cache.resident() == [[0, 1]] * LAYERS
    cache.plan([{0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}, {0: 1.0}])
    arrive(cache, 0, 2)  # nothing of layer 0 may go, and of the others only this may
    assert cache.resident() == [[0, 1, 2], [0, 1], [0, 1], [0]]
    assert not cache.prefetch(1, 2, 1)  # now all that is left is wanted


def test_slots_follow_the_decoder(make_cache) -> None:
    """Behind it even what was planned has served: the layers ahead get those slots."""
    cache = make_cache(2)
    for layer in range(LAYERS):
        walk(cache, layer, [0, 1])
    everything = [{0: 1.0, 1: 1.0, 2: 1.0} for _ in range(LAYERS)]
    cache.plan(everything)
    assert not cache.prefetch(3, 2, 3)
    walk(cache, 0, [0, 1])
    assert not cache.prefetch(3, 2, 3)  # layer 0 is where the decoder stands
    walk(cache, 1, [0, 1])
    arrive(cache, 3, 2)
    assert [len(experts) for experts in cache.resident()] == [1, 2, 2, 3]
    # The last slot of a layer is its own.
    walk(cache, 2, [0, 1])
    assert cache.prefetch(3, 3, 3) and not cache.prefetch(3, 4, 3)


def test_a_layer_with_one_slot_computes_while_it_loads(make_cache) -> None:
    """Its only own slot is leased: the next expert comes into a spare one meanwhile."""
    cache = make_cache(1, extra=1)
    with cache.stream(0, [0, 1, 2]) as stream:
        next(stream)
        eventually(lambda: len(cache.resident()[0]) == 2)
    assert cache.resident()[0]


def test_changing_the_policy_returns_what_was_lent(make_cache) -> None:
    cache = make_cache(2, extra=2)
    for layer in range(LAYERS):
        walk(cache, layer, [0, 1, 2, 3])
    assert max(map(len, cache.resident())) > 3
    cache.set_policy("lru")
    assert max(map(len, cache.resident())) <= 3 and cache.nbytes <= cache.capacity_nbytes
    cache.set_policy("lookahead")
    walk(cache, 0, [0, 1, 2, 3])
    assert len(cache.resident()[0]) > 3


def test_a_budget_in_bytes_buys_slots_that_layers_share() -> None:
    budget = CacheBudget(nbytes=1050)
    assert (budget.slots_per_layer(6, 4, 100), budget.extra_slots(6, 4, 100)) == (2, 2)
    assert CacheBudget(nbytes=10**6).extra_slots(6, 4, 100) == 0
    assert CacheBudget(slots=2).extra_slots(6, 4, 100) == CacheBudget(share=0.4).extra_slots(6, 4, 100) == 0
