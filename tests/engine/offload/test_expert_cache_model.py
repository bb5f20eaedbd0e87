"""The cache against a model of it: whatever is asked of it, in whatever order, its promises hold."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import POLICIES
from engine.errors import Cancelled, TransferError
from engine.offload.cache import ExpertCache
from engine.offload.links import Link
from engine.offload.slots import slot_nbytes

LAYERS, EXPERTS = 2, 5
layer = st.integers(0, LAYERS - 1)
expert = st.integers(0, EXPERTS - 1)
subset = st.lists(expert, max_size=EXPERTS + 2)
light = st.one_of(
    st.tuples(st.just("prefetch"), layer, expert, st.integers(0, 3)),
    st.tuples(st.just("plan"), st.none() | st.lists(st.dictionaries(expert, st.floats(0, 1)), min_size=2, max_size=2)),
    st.tuples(st.just("cancel_unplanned")),
    st.tuples(st.just("cancel_prefetches")),
    st.tuples(st.just("resize"), st.integers(1, EXPERTS)),
    st.tuples(st.just("set_policy"), st.sampled_from(POLICIES)),
)
stream = st.tuples(
    st.just("stream"),
    layer,
    subset,
    st.none() | st.integers(0, 3),  # leave after so many leases
    st.lists(light, max_size=3),  # what happens while the first leases are out
)
broken = st.tuples(st.just("failing"), st.frozensets(st.tuples(layer, expert), max_size=2))
script = st.lists(st.one_of(stream, stream, light, broken, st.tuples(st.just("settle"))), max_size=14)


class SmallChunks(Link):
    label = "test"
    bytes_per_s = 1e9

    def _chunk_nbytes(self) -> int:
        return 64


class Driver:
    """Plays a script, and counts for itself what the cache must have counted."""

    def __init__(self, cache: ExpertCache, source, workers: int) -> None:
        self.cache, self.source = cache, source
        self.requests = 0
        self.prefetched = 0

    def play(self, step: tuple) -> None:
        name, *arguments = step
        if name == "stream":
            self.stream(*arguments)
        elif name == "failing":
            self.source.failing = set(arguments[0])
        else:
            result = getattr(self.cache, name)(*arguments)
            self.prefetched += name == "prefetch" and result

    def stream(self, layer: int, experts: list[int], leave_after: int | None, meanwhile: list[tuple]) -> None:
        distinct = set(experts)
        self.requests += len(distinct)
        before = {e for e in self.cache.resident()[layer] if e in distinct}
        seen: list[int] = []
        failing = set(self.source.failing)
        try:
            with self.cache.stream(layer, experts) as leases:
                for lease in leases:
                    seen.append(lease.expert)
                    self.check(layer, lease)
                    if meanwhile:
                        self.play(meanwhile.pop())
                        self.check(layer, lease)
                    if leave_after is not None and len(seen) > leave_after:
                        break
        except TransferError:
            assert failing & {(layer, e) for e in distinct}
        else:
            assert leave_after is not None or set(seen) == distinct
        assert len(seen) == len(set(seen)) and set(seen) <= distinct
        # What was resident at the call comes first, whatever happens to the rest.
        assert set(seen[: len(before)]) <= before or set(seen[: len(before)]) >= before

    def check(self, layer: int, lease) -> None:
        gate_up, down = self.cache.table.shape.views(self.source.flat(layer, lease.expert).float())
        assert torch.equal(lease.gate_up, gate_up) and torch.equal(lease.down, down)

    def finish(self, witness) -> None:
        """Everything settled, nothing leaked, and it still works."""
        cache = self.cache
        cache.settle()
        slot = slot_nbytes(cache.table.shape, torch.float32)
        assert cache.nbytes <= cache.capacity_nbytes
        assert cache.capacity_nbytes == min(LAYERS * cache.slots_per_layer + cache._extra, LAYERS * EXPERTS) * slot
        stats = cache.stats
        assert stats.requests == self.requests == stats.hits + stats.late + stats.misses
        assert set(witness.outcomes) == set(witness.transfers)
        assert stats.prefetched == self.prefetched == sum(t.cause == "prefetch" for t in witness.transfers.values())
        settled = stats.prefetch_used + stats.prefetch_late + stats.prefetch_wasted + stats.prefetch_cancelled
        assert settled == stats.prefetched
        assert stats.bytes_loaded == sum(t.bytes_moved for t in witness.transfers.values())
        assert stats.bytes_wasted == sum(
            t.bytes_moved
            for t in witness.transfers.values()
            if t.cause == "prefetch" and witness.outcomes[t.id] in ("wasted", "cancelled")
        )
        for shelf in cache.pool.shelves:
            assert not any(slot.pinned or slot.transfer for slot in shelf.slots)
            assert {id(slot) for slot in shelf.by_expert.values()} <= {id(slot) for slot in shelf.slots}
            assert len(shelf.by_expert) == len(shelf.resident()) <= len(shelf.slots)
            if not cache.pool.policy.lends:
                assert len(shelf.slots) <= cache.slots_per_layer + cache._extra
        assert cache.pool.shelves._lent == sum(shelf.lent for shelf in cache.pool.shelves)
        self.source.failing = set()
        for layer in range(LAYERS):
            self.stream(layer, list(range(EXPERTS)), None, [])


@pytest.mark.parametrize("workers", [1, 2])
@given(slots=st.integers(1, EXPERTS), extra=st.integers(0, 1), policy=st.sampled_from(POLICIES), steps=script)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_script_keeps_the_promises(make_source, make_witness, workers: int, slots, extra, policy, steps) -> None:
    source, witness = make_source(LAYERS, EXPERTS, intermediate=4, hidden=8), make_witness()
    link = SmallChunks(source, workers)
    cache = ExpertCache(source.table, slots, torch.float32, link, policy, witness, extra=extra)
    driver = Driver(cache, source, workers)
    try:
        for step in steps:
            driver.play(step)
        driver.finish(witness)
    finally:
        cache.close()
        link.close()


def test_other_threads_may_prefetch_resize_and_stop(make_source, make_witness) -> None:
    """One thread streams while two others interfere: the bytes stay right and the books balance."""
    source, witness = make_source(LAYERS, EXPERTS, intermediate=4, hidden=8), make_witness()
    link = SmallChunks(source, 2)
    cache = ExpertCache(source.table, 2, torch.float32, link, "lookahead", witness)
    driver, over, errors = Driver(cache, source, 2), threading.Event(), []

    def interfere(seed: int) -> None:
        n = seed
        try:
            while not over.is_set():
                n += 1
                cache.prefetch(n % LAYERS, n * 7 % EXPERTS, n)
                if n % 5 == 0:
                    cache.cancel_prefetches()
                if n % 11 == 0:
                    cache.resize(1 + n % EXPERTS)
                cache.resident()
                over.wait(0.0002)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=interfere, args=(seed,)) for seed in (0, 1000)]
    for thread in threads:
        thread.start()
    stop = threading.Event()
    for n in range(300):
        driver.stream(n % LAYERS, [n % EXPERTS, (n + 1) % EXPERTS, (n * 3) % EXPERTS], None, [])
        if n % 50 == 0:
            stop.set()
            with pytest.raises(Cancelled):
                next(cache.stream(0, [0, 1, 2], stop=stop))
            driver.requests += 3
            stop.clear()
    over.set()
    for thread in threads:
        thread.join(20)
    assert not errors
    driver.prefetched = cache.stats.prefetched
    driver.finish(witness)
    cache.close()
    link.close()
