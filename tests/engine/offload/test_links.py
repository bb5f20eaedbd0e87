from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.errors import Cancelled, TransferError
from engine.offload.disk import DiskLink, RateMeter
from engine.offload.emulated import EmulatedLink
from engine.offload.links import Link
from engine.offload.transfer import CANCELLED, DONE, FAILED, QUEUED, RUNNING, Transfer

T = 20.0  # seconds until a test's wait counts as hung


class OneByOne(Link):
    """The base's queue alone: one worker, chunks of `chunk` bytes."""

    def __init__(self, source, chunk: int = 1024) -> None:
        self.chunk = chunk
        super().__init__(source, workers=1)

    label = "test"
    bytes_per_s = 1e9

    def _chunk_nbytes(self) -> int:
        return self.chunk


@pytest.fixture
def links() -> Iterator[list[Link]]:
    links: list[Link] = []
    yield links
    for link in links:
        link.source.close()  # opens all gates
        link.close()


@pytest.fixture
def link(source, links) -> OneByOne:
    links.append(OneByOne(source))
    return links[0]


@pytest.fixture(params=["disk", "emulated", "one"])
def any_link(request, source, links) -> Link:
    kinds = {"disk": DiskLink, "emulated": lambda s: EmulatedLink(s, 1.0, 10), "one": OneByOne}
    links.append(kinds[request.param](source))
    return links[0]


def submit(link: Link, layer: int, expert: int, cause: str = "demand", **kwargs) -> Transfer:
    dtype = kwargs.pop("dtype", torch.bfloat16)
    return link.submit(layer, expert, torch.zeros(link.source.table.shape.numel, dtype=dtype), cause=cause, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_expert_arrives_in_the_destinations_dtype(any_link: Link, dtype: torch.dtype) -> None:
    transfer = submit(any_link, 1, 3, dtype=dtype)
    any_link.wait(transfer, T)
    assert torch.equal(transfer.destination, any_link.source.flat(1, 3).to(dtype))
    assert (transfer.state, transfer.bytes_moved) == (DONE, any_link.source.expert_nbytes)
    assert 0 < transfer.queued_ns <= transfer.start_ns <= transfer.end_ns <= time.perf_counter_ns()


def test_large_experts_convert_in_parts(make_source, links) -> None:
    source = make_source(intermediate=256, hidden=512)  # 768 KiB stored, several conversions a chunk
    links.append(OneByOne(source, chunk=100_000))
    transfer = submit(links[0], 0, 1, dtype=torch.float32)
    links[0].wait(transfer, T)
    assert torch.equal(transfer.destination, source.flat(0, 1).float())


def test_every_transfer_has_its_own_id_and_one_callback(any_link: Link) -> None:
    ended: list[int] = []
    transfers = [
        submit(any_link, 0, expert, cause, on_done=lambda t: ended.append(t.id))
        for expert in range(6)
        for cause in ("demand", "prefetch")
    ]
    any_link.cancel(transfers[-1])
    for transfer in transfers:
        any_link.wait(transfer, T)
    assert len({transfer.id for transfer in transfers}) == 12
    assert sorted(ended) == sorted(transfer.id for transfer in transfers)


def test_a_demand_overtakes_a_prefetch_that_is_half_done(link: OneByOne, source, monkeypatch) -> None:
    monkeypatch.setattr("engine.offload.links.PAUSE_NS", 0)
    gate = source.gate(0, 0)
    prefetch = submit(link, 0, 0, "prefetch")
    assert source.entered[0, 0].wait(T)  # the first of its three chunks is being read
    demand = submit(link, 1, 1)
    gate.set()
    link.wait(prefetch, T)
    order = [(layer, expert) for layer, expert, _ in source.reads]
    assert order == [(0, 0), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0)]
    assert demand.end_ns <= prefetch.end_ns and torch.equal(prefetch.destination, source.flat(0, 0))
    overtaken = [(since, until) for since, until in prefetch.pauses if since <= demand.start_ns <= until]
    assert len(overtaken) == 1 and overtaken[0][0] >= prefetch.start_ns and overtaken[0][1] <= prefetch.end_ns
    assert not any(since <= prefetch.start_ns for since, _ in demand.pauses)


def blocked(link: OneByOne, source) -> threading.Event:
    """Keep the only worker busy until the event is set."""
    gate = source.gate(1, 5)
    submit(link, 1, 5)
    assert source.entered[1, 5].wait(T)
    source.reads.clear()
    return gate


def served(source) -> list[tuple[int, int]]:
    return list(dict.fromkeys((layer, expert) for layer, expert, _ in source.reads if (layer, expert) != (1, 5)))


def test_prefetches_go_by_deadline_and_demands_by_arrival(link: OneByOne, source) -> None:
    gate = blocked(link, source)
    transfers = [
        submit(link, 0, 0, "prefetch", deadline=30),
        submit(link, 0, 1, "prefetch", deadline=10),
        submit(link, 0, 2, "prefetch", deadline=20),
        submit(link, 0, 3),
        submit(link, 0, 4),
    ]
    gate.set()
    for transfer in transfers:
        link.wait(transfer, T)
    assert served(source) == [(0, 3), (0, 4), (0, 1), (0, 2), (0, 0)]


def test_promotion_makes_a_prefetch_urgent_but_keeps_its_cause(link: OneByOne, source) -> None:
    gate = blocked(link, source)
    early, late = submit(link, 0, 0, "prefetch", deadline=1), submit(link, 0, 1, "prefetch", deadline=2)
    link.promote(late)
    link.promote(late)
    gate.set()
    link.wait(early, T)
    link.wait(late, T)
    link.promote(late)  # over: nothing to do
    assert served(source) == [(0, 1), (0, 0)] and late.cause == "prefetch"


def test_a_queued_transfer_that_is_cancelled_never_starts(link: OneByOne, source) -> None:
    gate = blocked(link, source)
    ended: list[str] = []
    queued = submit(link, 0, 0, "prefetch", on_done=lambda t: ended.append(t.state))
    assert link.cancel(queued) and queued.state == CANCELLED and ended == [CANCELLED]
    assert link.cancel(queued)
    gate.set()
    link.wait(submit(link, 0, 1), T)
    assert served(source) == [(0, 1)] and queued.bytes_moved == 0
    assert queued.queued_ns <= queued.start_ns == queued.end_ns


def test_a_running_transfer_that_is_cancelled_stops_at_the_next_chunk(link: OneByOne, source) -> None:
    gate = source.gate(0, 0)
    ended = threading.Event()
    running = submit(link, 0, 0, "prefetch", on_done=lambda t: ended.set())
    assert source.entered[0, 0].wait(T)
    assert link.cancel(running) and running.state == RUNNING and not ended.is_set()
    gate.set()
    assert ended.wait(T)
    assert running.state == CANCELLED and running.bytes_moved == 1024 and len(source.reads) == 1


def test_what_is_done_cannot_be_cancelled(link: OneByOne) -> None:
    transfer = submit(link, 0, 0)
    link.wait(transfer, T)
    assert not link.cancel(transfer) and transfer.state == DONE


def test_wait_any_returns_those_that_ended(link: OneByOne, source) -> None:
    first = submit(link, 0, 1)
    link.wait(first, T)
    gate = blocked(link, source)
    second = submit(link, 0, 2)
    assert link.wait_any([second, first], T) == [first]
    gate.set()
    assert link.wait_any([second], T) == [second]


def test_a_failed_read_names_expert_layer_file_and_remedy(any_link: Link) -> None:
    any_link.source.failing.add((1, 2))
    transfer = submit(any_link, 1, 2)
    expected = r"expert 2 of layer 1 .*fake-1\.safetensors: .*Input/output error.*Check the disk"
    with pytest.raises(TransferError, match=expected) as caught:
        any_link.wait(transfer, T)
    assert isinstance(caught.value.__cause__, OSError)
    assert transfer.state == FAILED
    any_link.source.failing.clear()
    again = submit(any_link, 1, 2)
    any_link.wait(again, T)
    assert torch.equal(again.destination, any_link.source.flat(1, 2))


def test_a_read_that_never_ends_times_out_and_the_next_works(any_link: Link) -> None:
    source = any_link.source
    source.gate(0, 0)
    stuck = submit(any_link, 0, 0)
    assert source.entered[0, 0].wait(T)
    with pytest.raises(TransferError, match=r"expert 0 of layer 0.*nothing arrived for 0\.1 s"):
        any_link.wait(stuck, 0.1)
    assert stuck.state == FAILED and stuck.abandoned
    for expert in range(1, 6):
        following = submit(any_link, 0, expert)
        any_link.wait(following, T)
        assert torch.equal(following.destination, source.flat(0, expert))


def test_waiting_behind_a_stuck_read_frees_the_link_too(link: OneByOne, source) -> None:
    source.gate(0, 0)
    stuck = submit(link, 0, 0)
    assert source.entered[0, 0].wait(T)
    behind = submit(link, 0, 1)
    with pytest.raises(TransferError, match="expert 1 of layer 0"):
        link.wait(behind, 0.1)
    assert stuck.state == FAILED and stuck.abandoned and not behind.abandoned
    link.wait(submit(link, 0, 1), T)


def test_a_stuck_read_that_comes_back_changes_nothing(link: OneByOne, source) -> None:
    gate = source.gate(0, 0)
    stuck = submit(link, 0, 0)
    assert source.entered[0, 0].wait(T)
    thread = link._workers[0].thread
    with pytest.raises(TransferError):
        link.wait(stuck, 0.05)
    gate.set()
    thread.join(T)
    assert not thread.is_alive() and stuck.state == FAILED and stuck.bytes_moved == 0


def test_a_stop_flag_ends_a_wait(link: OneByOne, source) -> None:
    gate = blocked(link, source)
    stop = threading.Event()
    queued = submit(link, 0, 0)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(Cancelled):
        link.wait(queued, T, stop)
    gate.set()
    link.wait(queued, T)


def test_an_error_in_a_callback_is_kept_and_raised(link: OneByOne) -> None:
    def fail(transfer: Transfer) -> None:
        raise KeyError("bug")

    link.wait(submit(link, 0, 0, on_done=fail), T)
    with pytest.raises(TransferError, match="KeyError: 'bug'"):
        link.check()
    with pytest.raises(TransferError):
        submit(link, 0, 1)


def test_closing_an_idle_link_ends_its_threads_and_source(source) -> None:
    for make in (DiskLink, OneByOne, lambda s: EmulatedLink(s, 1.0)):
        before = set(threading.enumerate())
        link = make(source)
        assert len(set(threading.enumerate()) - before) >= 1
        source.closed = False
        link.close()
        link.close()
        assert set(threading.enumerate()) <= before and source.closed
        with pytest.raises(TransferError, match="closed"):
            submit(link, 0, 0)


def test_closing_a_full_link_cancels_everything_and_wakes_waiters(link: OneByOne, source) -> None:
    gate = blocked(link, source)
    transfers = [submit(link, 0, expert, "prefetch") for expert in range(5)]
    woken: list[str] = []
    waiters = [threading.Thread(target=lambda t=t: (link.wait(t, T), woken.append(t.state))) for t in transfers]
    for waiter in waiters:
        waiter.start()
    threading.Timer(0.05, gate.set).start()
    link.close()
    for waiter in waiters:
        waiter.join(T)
    assert woken == [CANCELLED] * 5 and served(source) == []
    assert not any(worker.thread.is_alive() for worker in link._workers)


def test_closing_an_emulated_link_does_not_wait_for_its_pace(source) -> None:
    link = EmulatedLink(source, 1e-8)  # the first chunk alone would take 100 s
    gate = source.gate(0, 0)
    transfer = submit(link, 0, 0)
    assert source.entered[0, 0].wait(T)
    gate.set()
    start = time.monotonic()
    link.close()
    assert time.monotonic() - start < 4 and transfer.state == CANCELLED


@pytest.mark.parametrize(("gbps", "latency_us"), [(0.001, 0), (0.01, 2000), (0.0005, 500)])
def test_an_emulated_transfer_is_never_faster_than_its_link(source, links, gbps: float, latency_us: float) -> None:
    link = EmulatedLink(source, gbps, latency_us)
    links.append(link)
    floor_ns = source.expert_nbytes / gbps + latency_us * 1e3
    start = time.perf_counter_ns()
    transfers = [submit(link, 0, expert) for expert in range(4)]
    for transfer in transfers:
        link.wait(transfer, T)
    assert time.perf_counter_ns() - start >= 4 * floor_ns
    assert all(transfer.end_ns - transfer.start_ns >= floor_ns - 1 for transfer in transfers)
    assert link.bytes_per_s == gbps * 1e9 and link.emulated


def test_the_emulated_pace_is_kept_by_the_clock_not_by_sleeps(source, links) -> None:
    """Each of 40 transfers starts exactly when the link was due to be free, however late a thread woke up."""
    link = EmulatedLink(source, 0.003)
    links.append(link)
    transfers = [submit(link, 0, n % 6) for n in range(40)]
    for transfer in transfers:
        link.wait(transfer, T)
    pace_ns = source.expert_nbytes / 0.003
    late = [b.start_ns - a.start_ns - pace_ns for a, b in zip(transfers, transfers[1:], strict=False)]
    # Only a machine that stalls for 20 ms makes the clock slip, and never forward.
    assert all(error > -10 for error in late)
    assert sum(abs(error) < 10 for error in late) > len(late) // 2


def test_an_idle_emulated_link_starts_when_it_is_asked(source, links) -> None:
    link = EmulatedLink(source, 1.0)
    links.append(link)
    link.wait(submit(link, 0, 0), T)
    second = submit(link, 0, 1)
    link.wait(second, T)
    assert second.start_ns == second.queued_ns


def test_a_new_rate_takes_effect_with_the_next_chunk(source, links) -> None:
    link = EmulatedLink(source, 1e-6)  # 3 s an expert, 1 s a chunk
    links.append(link)
    assert link.label == "emulated 1e-06 GB/s"
    transfer = submit(link, 0, 0)
    link.set_rate(1000, 50_000)
    link.wait(transfer, T)
    assert transfer.end_ns - transfer.start_ns < 3e9
    assert link.label == "emulated 1000 GB/s, 50000 µs" and link.bytes_per_s == 1e12
    slow = submit(link, 0, 1)
    link.wait(slow, T)
    assert slow.end_ns - slow.start_ns >= 50e6


def test_a_demand_overtakes_an_emulated_prefetch(make_source, links) -> None:
    source = make_source(intermediate=256, hidden=256)  # 384 KiB: 39 ms at 10 MB/s, in four chunks
    link = EmulatedLink(source, 0.01)
    links.append(link)
    gate = source.gate(0, 0)
    prefetch = submit(link, 0, 0, "prefetch")
    assert source.entered[0, 0].wait(T)
    demand = submit(link, 0, 1)
    gate.set()
    link.wait(demand, T)
    link.wait(prefetch, T)
    assert demand.end_ns < prefetch.end_ns
    order = [expert for _, expert, _ in source.reads]
    assert order == [0] + [1] * order.count(1) + [0] * (order.count(0) - 1) and order.count(1) == order.count(0) == 4


def test_the_disk_measures_its_rate(source, links, monkeypatch) -> None:
    link = DiskLink(source)
    links.append(link)
    assert link.bytes_per_s == RateMeter.ASSUMED and not link.emulated
    link.wait(submit(link, 0, 0), T)
    assert link.bytes_per_s != RateMeter.ASSUMED and link.label == "disk, buffered"


def test_the_meter_counts_overlapping_reads_once(monkeypatch) -> None:
    clock = iter([0, 1_000_000, 3_000_000, 8_000_000, 9_000_000])
    monkeypatch.setattr("engine.offload.disk.time.perf_counter_ns", lambda: next(clock))
    meter = RateMeter()
    meter.begin()  # at 0
    meter.begin()  # joins
    meter.end(500)  # at 1 ms
    meter.end(500)  # at 3 ms; then idle until 8 ms
    meter.begin()
    meter.end(1000)  # at 9 ms
    assert meter.bytes_per_s == 2000 / 4e-3


def test_the_meter_follows_a_change_slowly(monkeypatch) -> None:
    now = [0]
    monkeypatch.setattr("engine.offload.disk.time.perf_counter_ns", lambda: now[0])
    meter = RateMeter()
    for ns in (1_000_000, 2_000_000):
        meter.begin()
        now[0] += ns
        meter.end(RateMeter.WINDOW)
    first, second = RateMeter.WINDOW / 1e-3, RateMeter.WINDOW / 2e-3
    assert meter.bytes_per_s == pytest.approx(0.75 * first + 0.25 * second)


def test_states_begin_with_queued(link: OneByOne, source) -> None:
    gate = blocked(link, source)
    transfer = submit(link, 0, 0)
    assert transfer.state == QUEUED and transfer.start_ns == 0
    gate.set()
    link.wait(transfer, T)


def test_many_threads_at_once_lose_nothing(make_source, links) -> None:
    """Submits, promotions and cancellations from four threads: each transfer ends once, whole or cancelled."""
    source = make_source()
    link = DiskLink(source)
    links.append(link)
    ended: list[Transfer] = []

    def work(thread: int, done: Callable[[Transfer], None] = ended.append) -> None:
        for n in range(100):
            expert = (thread + n) % 6
            transfer = submit(link, n % 2, expert, ("demand", "prefetch")[n % 2], deadline=n, on_done=done)
            if n % 3 == 0:
                link.promote(transfer)
            if n % 4 == 0:
                link.cancel(transfer)
            if n % 7 == 0:
                link.wait(transfer, T)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(T)
    link.wait(submit(link, 0, 0, "prefetch", deadline=10**6), T)
    deadline = time.monotonic() + T
    while len(ended) < 400 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len({transfer.id for transfer in ended}) == len(ended) == 400
    for transfer in ended:
        assert transfer.state in (DONE, CANCELLED)
        if transfer.state == DONE:
            assert torch.equal(transfer.destination, source.flat(transfer.layer, transfer.expert))
