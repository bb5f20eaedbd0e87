"""When foreseen routes become transfers, against a cache that only remembers what it was asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.speculation.lookahead import Demand
from engine.speculation.prefetcher import IN_FLIGHT, TIMINGS, Prefetcher

LAYERS = 3


class Room:
    """`slots` free ones a layer; a full layer makes room by evicting `evictable` experts, unless they must stay."""

    table = SimpleNamespace(experts=12)

    def __init__(self, slots: int, evictable: tuple[int, ...] = ()) -> None:
        self.slots, self.evictable = slots, evictable
        self.here: list[set[int]] = [set(evictable) for _ in range(LAYERS)]
        self.asked: list[tuple[int, int]] = []
        self.prefetching = 0
        self.wanted = None

    def plan(self, wanted) -> None:
        self.wanted = wanted

    def cancel_unplanned(self) -> int:
        return 0

    def has(self, layer: int, expert: int) -> bool:
        return expert in self.here[layer]

    def prefetch(self, layer: int, expert: int, deadline: int, keep=()) -> bool:
        assert deadline == layer
        if len(self.here[layer]) >= self.slots + len(self.evictable):
            victims = [
                e for e in self.here[layer] & set(self.evictable) if e not in keep and e not in self.wanted[layer]
            ]
            if not victims:
                return False
            self.here[layer].remove(victims[0])
        self.here[layer].add(expert)
        self.asked.append((layer, expert))
        return True


def draft(prefetcher: Prefetcher, rows: list[list[int]]) -> None:
    """Each row routes to the same experts in every layer."""
    for row in rows:
        for layer in range(LAYERS):
            prefetcher.drafted(layer, [row], [[1.0] * len(row)])


def make(room: Room, timing: str) -> Prefetcher:
    prefetcher = Prefetcher(room, LAYERS, None)
    prefetcher.timing = timing
    return prefetcher


def test_early_asks_while_it_drafts_and_late_when_it_is_done() -> None:
    for timing in TIMINGS:
        room = Room(slots=4)
        prefetcher = make(room, timing)
        prefetcher.begin_round(2)
        draft(prefetcher, [[0, 1]])
        assert (room.asked == []) == (timing == "late")
        draft(prefetcher, [[1, 2]])
        prefetcher.plan_complete()
        assert sorted(room.asked) == [(layer, expert) for layer in range(LAYERS) for expert in (0, 1, 2)]
        if timing == "late":
            assert [layer for layer, _ in room.asked] == sorted(layer for layer, _ in room.asked)


def test_no_more_than_a_few_are_on_the_link() -> None:
    room = Room(slots=9)
    room.prefetching = IN_FLIGHT
    prefetcher = make(room, "early")
    prefetcher.begin_round(1)
    draft(prefetcher, [[0, 1]])
    assert room.asked == []
    room.prefetching = 0
    prefetcher.plan_complete()
    assert len(room.asked) == 2 * LAYERS


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_resident_that_the_draft_uses_again_and_again_stays(timing: str) -> None:
    """Expert 9 is in every row but the first of each draft. Only who asks at once, and does not think, evicts it."""
    rounds = [[[0], [9], [9], [9]] for _ in range(6)]
    room = Room(slots=0, evictable=(9,))
    prefetcher = make(room, timing)
    for number, rows in enumerate(rounds):
        room.here = [{9} for _ in range(LAYERS)]
        room.asked.clear()
        prefetcher.begin_round(len(rows))
        draft(prefetcher, rows)
        prefetcher.plan_complete()
        if number:  # adaptive must have seen a draft first
            assert ((0, 0) in room.asked) == (timing == "early")


def test_what_found_no_slot_is_asked_for_again_when_the_plan_is_complete() -> None:
    """While it may still be wanted it stays; in the end nobody wanted it."""
    room = Room(slots=0, evictable=(9,))
    prefetcher = make(room, "adaptive")
    prefetcher.begin_round(3)
    draft(prefetcher, [[9], [9], [9]])
    prefetcher.begin_round(3)
    draft(prefetcher, [[0], [0]])
    assert room.asked == []
    prefetcher.plan_complete()
    assert room.asked == [(layer, 0) for layer in range(LAYERS)]


def test_during_the_verification_the_next_layer_gets_a_slot_first() -> None:
    room = Room(slots=0)
    prefetcher = make(room, "adaptive")
    prefetcher.begin_round(1)
    draft(prefetcher, [[0]])
    prefetcher.plan_complete()
    assert room.asked == []
    room.here[2] = set()
    room.slots = 1
    room.here[1] = {5}  # still full
    prefetcher.verifying(0, None)
    assert room.asked == []  # layer 1 comes before layer 2
    room.here[1] = set()
    prefetcher.verifying(0, None)
    assert room.asked == [(1, 0), (2, 0)]
    prefetcher.begin_round(1)
    prefetcher.verifying(0, None)
    assert len(room.asked) == 2


def test_demand_is_a_share_of_rows_and_their_chance_at_least_once() -> None:
    demand = Demand(1)
    for number in range(400):
        demand.add(0, {0, 1} if number % 10 == 0 else {0})
    # Expert 1 in one of ten rows: 1 - 0.9 ** 6 < 1/2 < 1 - 0.9 ** 7, give or take what the last rows weigh.
    assert Demand(1).likely(0, 5) == demand.likely(0, 0) == set()
    assert demand.likely(0, 1) == {0}
    assert demand.likely(0, 4) == {0}
    assert demand.likely(0, 14) == {0, 1}
