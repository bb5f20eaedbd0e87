from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from one_by_one import OneByOne

from engine.errors import BudgetError, Cancelled, TransferError, UsageError
from engine.events import TRANSFER_OUTCOMES
from engine.offload.cache import ExpertCache
from engine.offload.disk import DiskLink
from engine.offload.source import ExpertSource

T = 20.0


@pytest.fixture
def make_cache(source, witness) -> Iterator[Callable[..., ExpertCache]]:
    made: list[ExpertCache] = []

    def make(slots: int, policy: str = "lru", **kwargs) -> ExpertCache:
        link = OneByOne(source, workers=1)
        made.append(ExpertCache(source.table, slots, torch.float32, link, policy, witness, **kwargs))
        return made[-1]

    yield make
    for cache in made:
        source.close()
        cache.close()
        cache.link.close()
        assert set(witness.outcomes) == set(witness.transfers)
        assert set(witness.outcomes.values()) <= set(TRANSFER_OUTCOMES)
        assert cache.nbytes == 0


def load(cache: ExpertCache, layer: int, experts: list[int]) -> list[int]:
    """Stream `experts`, check the bytes of each, and return the order in which they came."""
    order = []
    for lease in cache.stream(layer, experts):
        expected = cache.table.shape.views(cache.link.source.flat(layer, lease.expert).float())
        assert torch.equal(lease.gate_up, expected[0]) and torch.equal(lease.down, expected[1])
        order.append(lease.expert)
    return order


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + T
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def fetched(cache: ExpertCache, layer: int, expert: int, deadline: int = 0) -> None:
    assert cache.prefetch(layer, expert, deadline)
    eventually(lambda: expert in cache.resident()[layer])


def test_each_distinct_expert_comes_once_resident_ones_first(make_cache) -> None:
    cache = make_cache(4)
    assert sorted(load(cache, 0, [3, 1, 3])) == [1, 3]
    order = load(cache, 0, [0, 1, 2, 3, 0])
    assert order[:2] == [1, 3] and sorted(order[2:]) == [0, 2]
    assert cache.resident() == [[0, 1, 2, 3], []]
    stats = cache.stats
    assert (stats.requests, stats.hits, stats.late, stats.misses) == (6, 2, 0, 4)
    assert stats.bytes_loaded == 4 * cache.table.shape.nbytes


def test_an_empty_request_is_an_empty_stream(make_cache) -> None:
    assert load(make_cache(1), 0, []) == []


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fewer_slots_than_experts_are_served_in_waves(make_cache, slots: int) -> None:
    cache = make_cache(slots)
    for _ in range(3):
        assert sorted(load(cache, 1, [5, 4, 3, 2, 1, 0])) == [0, 1, 2, 3, 4, 5]
    assert len(cache.resident()[1]) == slots
    # A wave evicts nothing that is still wanted: each expert crossed the link at most once a call.
    assert cache.stats.bytes_loaded <= 18 * cache.table.shape.nbytes
    assert cache.stats.misses * cache.table.shape.nbytes == cache.stats.bytes_loaded


def test_residents_of_a_wave_are_all_hits(make_cache) -> None:
    """With 2 of 4 wanted experts resident, the two missing ones must not evict them before they are leased."""
    cache = make_cache(2)
    load(cache, 0, [0, 1])
    order = load(cache, 0, [2, 3, 0, 1])
    assert order[:2] == [0, 1] and cache.stats.hits == 2 and cache.stats.bytes_loaded == 4 * 3072


def test_all_demands_that_have_a_slot_start_at_the_call(make_cache, source) -> None:
    cache = make_cache(3)
    gates = [source.gate(0, expert) for expert in range(4)]
    stream = cache.stream(0, [0, 1, 2, 3])
    assert len(cache.link._active) == 3 and cache.stats.misses == 4
    for gate in gates:
        gate.set()
    assert len(list(stream)) == 4


def test_evictions_wait_until_the_link_needs_them(make_cache, source) -> None:
    """Three missing experts over three residents: two transfers keep one worker busy, so one resident stays so far."""
    cache = make_cache(3)
    load(cache, 0, [0, 1, 2])
    gate = source.gate(0, 3)
    with cache.stream(0, [3, 4, 5]) as stream:
        assert cache.resident()[0] == [2]  # the most recent one
        gate.set()
        assert {lease.expert for lease in stream} == {3, 4, 5}


def test_a_slot_is_refilled_as_soon_as_its_lease_ends(make_cache, source) -> None:
    cache = make_cache(2)
    gate = source.gate(0, 2)
    stream = cache.stream(0, [0, 1, 2])
    next(stream)
    assert not source.entered[0, 2].is_set()  # both slots are taken
    next(stream)
    assert source.entered[0, 2].wait(T)  # on its way while the second lease is out
    gate.set()
    assert next(stream).expert == 2


def test_a_prefetch_in_time_is_used(make_cache, witness) -> None:
    cache = make_cache(2)
    fetched(cache, 0, 3)
    assert not cache.prefetch(0, 3, 0)
    assert load(cache, 0, [3]) == [3]
    stats = cache.stats
    assert (stats.hits, stats.prefetched, stats.prefetch_used) == (1, 1, 1)
    load(cache, 0, [3])
    assert cache.stats.prefetch_used == 1 and witness.counts() == {"used": 1} and not witness.stalls


def test_a_prefetch_on_its_way_is_late_and_urgent(make_cache, source, witness) -> None:
    cache = make_cache(3)
    gate = source.gate(0, 0)
    assert cache.prefetch(0, 0, 0) and source.entered[0, 0].wait(T)
    assert cache.prefetch(0, 1, 1) and cache.prefetch(0, 2, 2)
    assert cache.prefetching == 3
    stream = cache.stream(0, [2])
    threading.Timer(0.05, gate.set).start()
    assert next(stream).expert == 2
    assert list(stream) == []
    eventually(lambda: cache.prefetching == 0)
    order = list(dict.fromkeys(read[:2] for read in source.reads))
    assert order == [(0, 0), (0, 2), (0, 1)]
    stats = cache.stats
    assert (stats.hits, stats.late, stats.misses) == (0, 1, 0)
    cache.settle()
    assert witness.counts() == {"late": 1, "wasted": 2} and len(witness.stalls) == 1
    assert (cache.stats.prefetch_late, cache.stats.prefetch_wasted) == (1, 2)


def test_a_prefetch_that_is_evicted_unused_is_wasted(make_cache, witness) -> None:
    cache = make_cache(1)
    fetched(cache, 0, 0)
    load(cache, 0, [1])
    assert witness.counts() == {"wasted": 1, "demand": 1}
    assert cache.take_round().evicted == [[0, 0]]


def test_a_prefetch_never_evicts_a_lease_or_the_plan(make_cache) -> None:
    cache = make_cache(2)
    load(cache, 0, [0, 1])
    cache.plan([{1: 0.5}, {}])
    for lease in cache.stream(0, [0]):
        assert lease.expert == 0 and not cache.prefetch(0, 2, 0)  # 0 is leased, 1 is planned
    fetched(cache, 0, 2)
    assert cache.resident()[0] == [1, 2]
    cache.plan([{1: 0.5, 2: 0.5, 3: 0.9}, {}])
    assert not cache.prefetch(0, 3, 0)
    cache.plan(None)
    fetched(cache, 0, 3)


def test_plan_changes_cancel_what_nobody_wants(make_cache, source, witness) -> None:
    cache = make_cache(3)
    gate = source.gate(0, 0)
    for expert in range(3):
        assert cache.prefetch(0, expert, expert)
    assert source.entered[0, 0].wait(T)
    cache.plan([{1: 0.1}, {}])
    assert cache.cancel_unplanned() == 2 and cache.prefetching == 1
    gate.set()
    eventually(lambda: cache.resident()[0] == [1])
    assert witness.counts() == {"cancelled": 2} and cache.stats.prefetch_cancelled == 2
    assert cache.cancel_prefetches() == 0


def test_a_demand_takes_the_slot_of_a_prefetch_of_others(make_cache, source) -> None:
    cache = make_cache(1)
    gate = source.gate(0, 0)
    assert cache.prefetch(0, 0, 0) and source.entered[0, 0].wait(T)
    stream = cache.stream(0, [1])
    threading.Timer(0.02, gate.set).start()
    assert [lease.expert for lease in stream] == [1]
    assert cache.stats.prefetch_cancelled == 1 and cache.stats.misses == 1


def test_what_was_just_cancelled_can_be_asked_for_again(make_cache, source) -> None:
    cache = make_cache(1)
    gate = source.gate(0, 0)
    assert cache.prefetch(0, 0, 0) and source.entered[0, 0].wait(T)
    assert cache.cancel_prefetches() == 1
    threading.Timer(0.02, gate.set).start()
    assert load(cache, 0, [0]) == [0]
    assert (cache.stats.misses, cache.stats.late) == (1, 0)


def test_a_prefetch_between_two_leases_serves_the_same_call(make_cache) -> None:
    cache = make_cache(2)
    load(cache, 0, [0, 1])
    stream = cache.stream(0, [0, 1, 2])
    next(stream)
    stream._pool.shelves[0].by_expert[0].pinned = False  # a slot that comes free without the stream's doing
    assert cache.prefetch(0, 2, 0)
    assert sorted(lease.expert for lease in stream) == [1, 2]


def test_a_failed_read_raises_and_the_next_call_works(make_cache, source, witness) -> None:
    cache = make_cache(2)
    source.failing.add((0, 1))
    with pytest.raises(TransferError, match="expert 1 of layer 0"):
        for _ in cache.stream(0, [0, 1, 2]):
            pass
    source.failing.clear()
    assert sorted(load(cache, 0, [0, 1, 2])) == [0, 1, 2]
    assert len(cache.pool.shelves[0].slots) == 2


def test_a_failed_prefetch_is_no_error_until_it_is_needed(make_cache, source, witness) -> None:
    cache = make_cache(1)
    source.failing.add((0, 1))
    assert cache.prefetch(0, 1, 0)
    eventually(lambda: witness.counts() == {"cancelled": 1})
    assert load(cache, 0, [0]) == [0]
    with pytest.raises(TransferError):
        load(cache, 0, [1])
    source.failing.clear()
    assert load(cache, 0, [1]) == [1]


def test_a_read_that_never_ends_times_out_and_the_next_call_works(make_cache, source) -> None:
    cache = make_cache(1, timeout_s=0.1)
    gate = source.gate(0, 0)
    with pytest.raises(TransferError, match=r"expert 0 of layer 0.*nothing arrived"):
        load(cache, 0, [0])
    assert load(cache, 0, [1]) == [1]
    (slot,) = cache.pool.shelves[0].slots
    before = slot.flat.clone()
    stuck = next(worker.thread for worker in cache.link._disowned)
    gate.set()
    stuck.join(T)
    assert torch.equal(slot.flat, before)  # the stuck read wrote to a slot that nobody has any more


def test_a_stuck_prefetch_does_not_hold_up_the_demand_for_ever(make_cache, source) -> None:
    cache = make_cache(1, timeout_s=0.1)
    source.gate(0, 0)
    assert cache.prefetch(0, 0, 0) and source.entered[0, 0].wait(T)
    with pytest.raises(BudgetError, match="no slot of layer 0"):
        load(cache, 0, [1])
    assert load(cache, 0, [1]) == [1]


def test_a_stop_flag_ends_a_wait_promptly(make_cache, source) -> None:
    cache = make_cache(2)
    gate = source.gate(0, 0)
    stop = threading.Event()
    set_at: list[float] = []
    threading.Timer(0.05, lambda: (set_at.append(time.monotonic()), stop.set())).start()
    with pytest.raises(Cancelled):
        next(cache.stream(0, [0], stop=stop))
    assert time.monotonic() - set_at[0] < 1.0
    gate.set()
    assert sorted(load(cache, 0, [0, 1])) == [0, 1]


def test_a_stop_flag_that_is_set_already_stops_before_the_first_lease(make_cache) -> None:
    cache = make_cache(2)
    load(cache, 0, [0])
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        next(cache.stream(0, [0], stop=stop))
    assert load(cache, 0, [0, 1]) == [0, 1]


def test_leaving_a_stream_early_releases_everything(make_cache, source) -> None:
    cache = make_cache(2)
    with pytest.raises(KeyError), cache.stream(0, [0, 1, 2, 3]) as leases:
        next(leases)
        raise KeyError
    assert not any(slot.pinned for slot in cache.pool.shelves[0].slots)
    stream = cache.stream(0, [4, 5])
    next(stream)
    stream.close()
    stream.close()
    assert not any(slot.pinned for slot in cache.pool.shelves[0].slots)
    assert sorted(load(cache, 0, [0, 1, 2, 3])) == [0, 1, 2, 3]


def test_leaving_a_stream_early_stops_its_transfers(make_cache, source, witness) -> None:
    cache = make_cache(2)
    gate = source.gate(0, 0)
    with cache.stream(0, [0, 1, 2]):
        assert source.entered[0, 0].wait(T)
    gate.set()
    eventually(lambda: len(witness.outcomes) == 2)
    assert witness.counts() == {"cancelled": 2} and len(source.reads) == 1


def test_a_stream_that_was_cut_short_says_so(make_cache) -> None:
    """Silence would leave experts out of a token's sum."""
    cache = make_cache(2)
    first = cache.stream(0, [0, 1])
    next(first)
    assert sorted(load(cache, 1, [0, 1])) == [0, 1]
    with pytest.raises(RuntimeError, match="closed before"):
        next(first)
    done = cache.stream(0, [2])
    assert len(list(done)) == 1
    with pytest.raises(StopIteration):
        next(done)


def test_a_leased_slot_is_not_overwritten(make_cache, source) -> None:
    cache = make_cache(2)
    load(cache, 0, [0, 1])
    for lease in cache.stream(0, [0]):
        kept = lease.gate_up.clone()
        fetched(cache, 0, 2)
        assert not cache.prefetch(0, 3, 0) or cache.cancel_prefetches() >= 0
        eventually(lambda: cache.prefetching == 0)
        assert torch.equal(lease.gate_up, kept)


def test_shrinking_spares_the_lease_and_frees_the_rest(make_cache) -> None:
    cache = make_cache(4)
    load(cache, 0, [0, 1, 2, 3])
    slot_bytes = cache.nbytes // 4
    stream = cache.stream(0, [0, 1])
    lease = next(stream)
    cache.resize(1)
    assert cache.resident()[0] == [0, 1]  # one leased, one still to come
    assert torch.equal(lease.gate_up.flatten(), source_part(cache, 0, 0))
    assert next(stream).expert == 1
    assert cache.resident()[0] == [1]
    assert list(stream) == []
    assert cache.nbytes == slot_bytes
    assert sorted(load(cache, 0, [0, 2])) == [0, 2]
    assert cache.nbytes == slot_bytes and cache.capacity_nbytes == 2 * slot_bytes


def source_part(cache: ExpertCache, layer: int, expert: int) -> torch.Tensor:
    return cache.table.shape.views(cache.link.source.flat(layer, expert).float())[0].flatten()


def test_growing_keeps_what_is_there(make_cache) -> None:
    cache = make_cache(1)
    load(cache, 0, [0])
    cache.resize(3)
    assert cache.nbytes == cache.capacity_nbytes // 6  # allocated when needed
    load(cache, 0, [1, 2])
    assert cache.resident()[0] == [0, 1, 2]
    cache.resize(100)
    assert cache.slots_per_layer == 6
    for slots in (0, -1):
        with pytest.raises(BudgetError, match="at least 1 slot"):
            cache.resize(slots)


def test_shrinking_under_prefetches_cancels_them(make_cache, source) -> None:
    cache = make_cache(3)
    gate = source.gate(0, 0)
    for expert in range(3):
        assert cache.prefetch(0, expert, expert)
    assert source.entered[0, 0].wait(T)
    cache.resize(1)
    gate.set()
    eventually(lambda: cache.nbytes == cache.capacity_nbytes // 2)
    assert cache.stats.prefetch_cancelled == 2


def test_policies_change_while_it_runs(make_cache) -> None:
    cache = make_cache(2, "lru")
    for layer in range(2):
        load(cache, layer, [0, 1])
    cache.set_policy("lookahead")
    assert len(list(cache.stream(0, [0, 1], {0: 0.9, 1: 0.1}))) == 2
    load(cache, 0, [2])  # by recency, 0 would go
    assert cache.resident()[0] == [0, 2]
    with pytest.raises(UsageError):
        cache.set_policy("best")


def test_scores_guide_the_lookahead_policy(make_cache) -> None:
    cache = make_cache(1, "lookahead", extra=1)
    assert len(list(cache.stream(0, [0, 1], {0: 0.9, 1: 0.1}))) == 2
    load(cache, 0, [2])
    assert cache.resident()[0] == [0, 2]


def test_a_round_is_counted_and_taken(make_cache) -> None:
    cache = make_cache(2)
    load(cache, 0, [0, 1])
    load(cache, 1, [3])
    load(cache, 0, [1, 2])
    counts = cache.take_round()
    assert (counts.hits, counts.late, counts.misses) == (1, 0, 4)
    assert counts.used == [[0, 1, 2], [3]] and counts.evicted == [[0, 0]]
    counts = cache.take_round()
    assert (counts.hits, counts.misses, counts.used, counts.evicted) == (0, 0, [[], []], [])


def test_reset_empties_cache_and_counts(make_cache, witness) -> None:
    cache = make_cache(2)
    load(cache, 0, [0, 1])
    fetched(cache, 1, 0)
    cache.stream(0, [0])
    cache.reset()
    assert cache.resident() == [[], []] and witness.counts() == {"demand": 2, "wasted": 1}
    assert cache.stats == type(cache.stats)() and cache.take_round().used == [[], []]
    assert load(cache, 0, [0]) == [0] and cache.stats.misses == 1


def test_a_run_that_ends_calls_unused_prefetches_wasted(make_cache, witness) -> None:
    cache = make_cache(2)
    fetched(cache, 0, 0)
    cache.settle()
    assert witness.counts() == {"wasted": 1} and cache.resident()[0] == [0]
    load(cache, 0, [0])
    assert witness.counts() == {"wasted": 1} and cache.stats.hits == 1


def test_closing_the_link_under_a_waiting_stream_raises(make_cache, source) -> None:
    cache = make_cache(1)
    source.gate(0, 0)
    stream = cache.stream(0, [0])
    assert source.entered[0, 0].wait(T)
    threading.Timer(0.05, lambda: (threading.Timer(0.05, source.close).start(), cache.link.close())).start()
    with pytest.raises(TransferError, match="closed"):
        next(stream)


def test_stalls_are_told_as_they_were_waited(make_cache, source, witness) -> None:
    cache = make_cache(2)
    gate = source.gate(1, 0)
    stream = cache.stream(1, [0])
    threading.Timer(0.05, gate.set).start()
    start = time.perf_counter_ns()
    next(stream)
    end = time.perf_counter_ns()
    ((layer, stall_start, stall_end),) = witness.stalls
    assert layer == 1 and start <= stall_start and stall_end <= end and stall_end - stall_start > 40e6
    load(cache, 1, [0])
    assert len(witness.stalls) == 1


def test_bytes_of_a_checkpoint_reach_the_lease(checkpoint, witness) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = ExpertCache(checkpoint.table, 2, dtype, DiskLink(ExpertSource(checkpoint.table)), "lru")
        for layer in range(checkpoint.table.layers):
            for lease in cache.stream(layer, range(4), None):
                assert lease.gate_up.data_ptr() % 4096 == 0
                gate, up = lease.gate_up.chunk(2)
                for part, value in (("gate", gate), ("up", up), ("down", lease.down)):
                    assert torch.equal(value, checkpoint.tensors[f"{layer}.{lease.expert}.{part}"].to(dtype))
        cache.close()
        cache.link.close()
