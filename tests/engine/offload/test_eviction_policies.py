from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from engine.config import POLICIES
from engine.errors import UsageError
from engine.offload.policies import LFU, LRU, Lookahead, create_policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_known_policy_picks_one_of_the_candidates(name: str) -> None:
    policy = create_policy(name)
    assert policy.victim(0, [5]) == 5  # also one that it has never heard of
    for layer in range(2):
        policy.tick(layer)
        for expert in range(4):
            policy.touch(layer, expert, 0.5)
    assert policy.victim(1, [2, 3]) in (2, 3)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'random'.*lookahead, lru, lfu"):
        create_policy("random")


@pytest.mark.parametrize("name", ["lru", "lfu"])
def test_layers_are_never_pooled(name: str) -> None:
    """A walk over the layers in a circle: what layer 0 keeps does not depend on layer 1."""
    policy, alone = create_policy(name), create_policy(name)
    rng = random.Random(1)
    for _ in range(50):
        expert = rng.randrange(6)
        policy.touch(0, expert, 1.0)
        alone.touch(0, expert, 1.0)
        for _ in range(3):
            policy.touch(1, rng.randrange(6), 1.0)
    for _ in range(20):
        candidates = rng.sample(range(6), 3)
        assert policy.victim(0, candidates) == alone.victim(0, candidates)


def test_lru_agrees_with_an_ordered_dict() -> None:
    policy, order, rng = LRU(), OrderedDict(), random.Random(0)
    for _ in range(300):
        expert = rng.randrange(8)
        policy.touch(0, expert, rng.random())
        order.pop(expert, None)
        order[expert] = None
        candidates = rng.sample(list(order), rng.randint(1, len(order)))
        assert policy.victim(0, candidates) == next(e for e in order if e in candidates)


def test_lru_takes_an_arrival_for_a_use() -> None:
    policy = LRU()
    policy.touch(0, 1, 1.0)
    policy.admit(0, 2)
    assert policy.victim(0, [1, 2]) == 1


def test_lfu_evicts_the_rarest_then_the_oldest() -> None:
    policy = LFU()
    for expert in (1, 1, 2, 3, 2, 3):
        policy.touch(0, expert, 1.0)
    policy.admit(0, 4)
    assert policy.victim(0, [1, 2, 3, 4]) == 4  # an arrival is no request
    assert policy.victim(0, [1, 2, 3]) == 1  # all twice; 1 is the oldest
    policy.touch(0, 1, 1.0)
    assert policy.victim(0, [1, 2, 3]) == 2


def test_lookahead_protects_the_plan() -> None:
    policy = Lookahead()
    for expert, score in ((0, 0.1), (1, 0.9), (2, 0.5)):
        policy.touch(0, expert, score)
    assert policy.victim(0, [0, 1, 2]) == 0
    policy.set_plan([{0: 0.01}, {}])
    assert policy.victim(0, [0, 1, 2]) == 2
    assert policy.victim(0, [0]) == 0  # last, not never
    policy.set_plan([{0: 0.2, 1: 0.2, 2: 0.2}, {}])
    assert policy.victim(0, [1, 2]) == 2  # a tie: the lower score
    policy.set_plan(None)
    assert policy.victim(0, [0, 1, 2]) == 0


def test_lookahead_forgets() -> None:
    """A large score of long ago weighs less than a small one of now: 0.95 ** 60 < 0.1."""
    policy = Lookahead()
    policy.touch(0, 0, 1.0)
    for _ in range(60):
        policy.tick(0)
    policy.touch(0, 1, 0.1)
    assert policy.victim(0, [0, 1]) == 0
    policy.tick(1)  # another layer's time does not pass here
    policy.touch(0, 0, 0.1)
    assert policy.victim(0, [0, 1]) == 1


def test_lookahead_loads_what_is_worth_keeping_last():
    policy = create_policy("lookahead")
    for expert, score in ((0, 0.9), (1, 0.1), (2, 0.5)):
        policy.touch(0, expert, score)
    assert policy.load_order(0, [0, 1, 2]) == [1, 2, 0]
    assert create_policy("lru").load_order(0, [0, 1, 2]) == [0, 1, 2]


def test_the_plan_of_a_layer_is_spent_when_its_pass_begins() -> None:
    policy = Lookahead()
    policy.set_plan([{0: 1.0}, {0: 1.0}])
    policy.tick(0)
    policy.touch(0, 0, 0.1)
    policy.touch(0, 1, 0.9)
    assert policy.victim(0, [0, 1]) == 0
    assert policy.victim(1, [0, 1]) == 1  # not there yet
    policy.set_plan([{0: 1.0}, {}])
    assert policy.victim(0, [0, 1]) == 1


@pytest.mark.parametrize("name", POLICIES)
def test_rejected_tokens_leave_no_trace(name: str) -> None:
    """A pass whose rejected rows wanted more experts ends as the same pass without those rows."""
    rng = random.Random(3)
    policy, alone = create_policy(name), create_policy(name)
    for _ in range(200):
        kept = {e: rng.random() for e in rng.sample(range(8), 3)}
        rejected = {e: rng.random() for e in rng.sample(range(8), 3)}
        for one in (policy, alone):
            one.tick(0)
        for expert, score in kept.items():
            alone.touch(0, expert, score)
            policy.touch(0, expert, score + rejected.get(expert, 0.0))
        for expert in set(rejected) - set(kept):
            policy.touch(0, expert, rejected[expert])
        policy.reject(0, rejected, kept)
        candidates = rng.sample(range(8), rng.randint(1, 8))
        assert policy.victim(0, candidates) == alone.victim(0, candidates)


@pytest.mark.parametrize("name", POLICIES)
def test_what_came_for_rejected_tokens_goes_first(name: str) -> None:
    policy = create_policy(name)
    policy.tick(0)
    policy.touch(0, 1, 0.3)
    policy.admit(0, 2)
    policy.tick(0)
    policy.touch(0, 2, 0.9)
    assert policy.victim(0, [1, 2]) == 1
    policy.reject(0, {2: 0.9}, kept=[])
    assert policy.victim(0, [1, 2]) == 2
