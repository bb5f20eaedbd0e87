"""Experts in main memory: the slab, the stream that copies out of it, the link between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from engine.errors import BudgetError, Cancelled, TransferError
from engine.model.device import CPU
from engine.offload import host_link
from engine.offload.host import HostSlab, slab_nbytes
from engine.offload.host_link import HostLink
from engine.offload.source import PAGE, ExpertSource
from engine.offload.streams import Copy, CopyStream, Fence, ThreadStream
from engine.offload.transfer import CANCELLED, DONE, Transfer

T = 10.0
PAIRS = [(layer, expert) for layer in range(2) for expert in range(4)]


def load(checkpoint, dtype: torch.dtype = torch.bfloat16, progress=lambda done, total: None) -> HostSlab:
    source = ExpertSource(checkpoint.table, direct=False)
    try:
        return HostSlab.load(source, dtype, CPU, progress, lambda: False)
    finally:
        source.close()


@pytest.fixture
def slab(checkpoint) -> HostSlab:
    return load(checkpoint)


@pytest.fixture
def link(slab) -> Iterator[HostLink]:
    link = HostLink(slab, CPU)
    yield link
    link.close()


def submit(link: HostLink, layer: int, expert: int, cause: str = "demand", dtype=torch.bfloat16, **more) -> Transfer:
    return link.submit(layer, expert, torch.zeros(link.source.table.shape.numel, dtype=dtype), cause=cause, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_slab_holds_what_was_saved(checkpoint, dtype):
    told: list[tuple[int, int]] = []
    slab = load(checkpoint, dtype, lambda done, total: told.append((done, total)))
    for layer, expert in PAIRS:
        flat = checkpoint.flat(layer, expert).to(dtype)
        gate_up, down = slab.weights(layer, expert)
        assert torch.equal(torch.cat([gate_up.flatten(), down.flatten()]), flat)
        read = torch.empty(slab.expert_nbytes - 16, dtype=torch.uint8)
        slab.read(layer, expert, 16, read)
        assert torch.equal(read, flat.view(torch.uint8)[16:])
    total = len(PAIRS) * checkpoint.table.shape.nbytes
    assert told[-1] == (total, total) and len(told) == len(PAIRS)
    assert slab.dtype == dtype and slab.expert_nbytes == checkpoint.table.shape.numel * dtype.itemsize
    slab.close()
    assert slab.nbytes == 0


def test_the_slab_takes_whole_pages_and_no_more(checkpoint, slab):
    nbytes = checkpoint.table.shape.nbytes
    assert slab.nbytes == slab_nbytes(checkpoint.table, torch.bfloat16)
    assert slab.nbytes == len(PAIRS) * (nbytes + -nbytes % PAGE)
    assert slab.expert(1, 3).data_ptr() % PAGE == 0


def test_loading_can_be_cancelled_and_refused(checkpoint, monkeypatch):
    source = ExpertSource(checkpoint.table, direct=False)
    with pytest.raises(Cancelled):
        HostSlab.load(source, torch.bfloat16, CPU, lambda done, total: None, lambda: True)

    def refuse(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("engine.offload.host.allocate", refuse)
    with pytest.raises(BudgetError, match="GiB of main memory.*use --link disk"):
        HostSlab.load(source, torch.bfloat16, CPU, lambda done, total: None, lambda: False)
    source.close()


@pytest.mark.parametrize("chunk", [48, 2**20])
def test_experts_arrive_whole(checkpoint, link, monkeypatch, chunk: int):
    monkeypatch.setattr(host_link, "CHUNK", chunk)
    transfers = [submit(link, *pair) for pair in PAIRS]
    for (layer, expert), transfer in zip(PAIRS, transfers, strict=True):
        link.wait(transfer, T)
        assert transfer.state == DONE and torch.equal(transfer.destination, checkpoint.flat(layer, expert))
        assert 0 < transfer.queued_ns <= transfer.start_ns <= transfer.end_ns
        assert transfer.bytes_moved == transfer.nbytes == link.source.expert_nbytes
    assert not link.emulated and "no CUDA device" in link.label


class Scripted(CopyStream):
    """Copies when it is told to, says that each took `ns`, and remembers what it was asked for."""

    def __init__(self, ns: int = 1_000_000) -> None:
        self.ns = ns
        self.fences = 0
        self.asked: list[tuple[int, Fence | None]] = []
        self.go = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.closed = False

    def fence(self) -> Fence | None:
        self.fences += 1
        return f"fence {self.fences}"  # type: ignore[return-value]

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Fence | None) -> Copy:
        self.asked.append((len(source), after))
        return _Scripted(self, destination, source)

    def close(self) -> None:
        self.closed = True


class _Scripted(Copy):
    def __init__(self, stream: Scripted, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._stream, self._destination, self._source = stream, destination, source

    def wait(self) -> int:
        self._stream.entered.set()
        assert self._stream.go.wait(T)
        if self._stream.error:
            raise self._stream.error
        self._destination.copy_(self._source)
        return self._stream.ns


@pytest.fixture
def stream() -> Scripted:
    return Scripted()


@pytest.fixture
def scripted(slab, stream) -> Iterator[HostLink]:
    link = HostLink(slab, CPU, stream)
    yield link
    stream.go.set()
    link.close()
    assert stream.closed


def test_a_copy_waits_for_what_the_device_had_to_do_when_it_was_asked_for(scripted, stream):
    stream.go.set()
    for pair in PAIRS[:3]:
        scripted.wait(submit(scripted, *pair), T)
    assert [fence for _, fence in stream.asked] == ["fence 1", "fence 2", "fence 3"]


def test_times_and_rate_are_those_of_the_streams_events(scripted, stream, monkeypatch):
    """However long it took to hear of them: 2 copies of 4 ms each."""
    stream.ns = 4_000_000
    first, second = (submit(scripted, 0, expert) for expert in (0, 1))
    assert stream.entered.wait(T)
    time.sleep(0.03)
    stream.go.set()
    for transfer in (first, second):
        scripted.wait(transfer, T)
        assert 4_000_000 <= transfer.end_ns - transfer.start_ns < 20_000_000
    assert scripted.bytes_per_s == pytest.approx(scripted.source.expert_nbytes / 4e-3)


def test_cancelled_between_chunks(scripted, stream, monkeypatch):
    monkeypatch.setattr(host_link, "CHUNK", 64)
    transfer = submit(scripted, 0, 0, "prefetch")
    assert stream.entered.wait(T)
    assert scripted.cancel(transfer)
    stream.go.set()
    scripted.wait_any([transfer], T)
    assert transfer.state == CANCELLED and 0 < transfer.bytes_moved < transfer.nbytes


def test_a_demand_overtakes_a_prefetch(scripted, stream, monkeypatch):
    monkeypatch.setattr(host_link, "CHUNK", 512)
    prefetch = submit(scripted, 0, 0, "prefetch")
    assert stream.entered.wait(T)
    demand = submit(scripted, 1, 1)
    stream.go.set()
    scripted.wait(demand, T)
    scripted.wait(prefetch, T)
    fences = [fence for _, fence in stream.asked]
    assert fences.count("fence 1") == fences.count("fence 2") == 6
    assert fences[0] == "fence 1" and "fence 1" in fences[fences.index("fence 2") :]


def test_a_copy_that_fails_says_so_in_one_line(scripted, stream):
    stream.error = RuntimeError("CUDA error: out of luck\nCompile with TORCH_USE_CUDA_DSA")
    stream.go.set()
    with pytest.raises(
        TransferError, match="expert 2 of layer 1 could not be copied to cpu: CUDA error: out of luck"
    ) as e:
        scripted.wait(submit(scripted, 1, 2), T)
    assert "\n" not in str(e.value)
    stream.error = None
    scripted.wait(submit(scripted, 1, 2), T)


def test_a_thread_stream_keeps_order_and_its_errors_to_their_copies():
    before = threading.active_count()
    stream = ThreadStream()
    a, b = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    one = torch.arange(1, 5, dtype=torch.uint8)
    moves = [(a, one), (b, a), (b, one[:3]), (a, one + 1)]
    copies = [stream.copy(destination, source, None) for destination, source in moves]
    for index, copy in enumerate(copies):
        if index == 2:
            with pytest.raises(ValueError, match="broadcast"):
                copy.wait()
        else:
            assert copy.wait() > 0
    assert torch.equal(b, one) and torch.equal(a, one + 1) and stream.fence() is None
    stream.close()
    assert threading.active_count() == before
