"""Copies that run beside the computation, in the order in which they were asked for: CUDA's own stream, or a thread.

Both are driven by the same link (`engine/offload/host_link.py`). The thread is what runs where there is no CUDA
device, in the tests too; only `CudaStream` itself is CUDA's.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from typing import Protocol, cast

import torch


class Fence(Protocol):
    """A point in the work that a device was given; a copy may be told to wait until the device is past it."""

    def query(self) -> bool:
        """Whether the device is past it."""


class Copy(ABC):
    """One copy under way."""

    @abstractmethod
    def wait(self) -> int:
        """Block until it is done; the ns that it took by itself. Raises what went wrong."""


class CopyStream(ABC):
    """Runs copies one after the other. Safe to use from several threads."""

    @abstractmethod
    def fence(self) -> Fence | None:
        """What the device was asked to compute so far by the calling thread; None if that is over already."""

    @abstractmethod
    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Fence | None) -> Copy:
        """Start to copy flat bytes, once the device is past `after`. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """End what the stream holds. No copy may be under way."""


class ThreadStream(CopyStream):
    """A thread that copies within main memory. What the processor computes is over when its call returns: no fences."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_ThreadCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="copy-stream", daemon=True)
        self._thread.start()

    def fence(self) -> Fence | None:
        return None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Fence | None) -> Copy:
        job = _ThreadCopy(destination, source)
        self._queue.put(job)
        return job

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()


class _ThreadCopy(Copy):
    def __init__(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._destination, self._source = destination, source
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._ns = 0

    def run(self) -> None:
        begin = time.perf_counter_ns()
        try:
            # numpy's copy takes one core and lets go of the interpreter; torch's would wake its thread pool.
            self._destination.numpy()[:] = self._source.numpy()
        except BaseException as error:
            self._error = error
        self._ns = time.perf_counter_ns() - begin
        self._done.set()

    def wait(self) -> int:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._ns


class CudaStream(CopyStream):
    """A CUDA stream of its own: pinned memory to the device while the default stream computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # The two events of a copy must enclose it and nothing else.
        self._lock = threading.Lock()

    def fence(self) -> Fence | None:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record()
        return event

    def copy(self, destination: torch.Tensor, source: torch.Tensor, after: Fence | None) -> Copy:
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(cast(torch.cuda.Event, after))
            begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            begin.record(self._stream)
            destination.copy_(source, non_blocking=True)
            end.record(self._stream)
        return _CudaCopy(begin, end)

    def close(self) -> None:
        self._stream.synchronize()


class _CudaCopy(Copy):
    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end

    def wait(self) -> int:
        self._end.synchronize()
        return int(self._begin.elapsed_time(self._end) * 1e6)


def create_stream(device: torch.device) -> CopyStream:
    """The stream that feeds `device`."""
    return CudaStream(device) if device.type == "cuda" else ThreadStream()
