"""The disk as slow tier: direct reads by a small pool."""

from __future__ import annotations

import threading
import time

from engine.offload.links import Link
from engine.offload.source import PAGE
from engine.offload.transfer import Chunk
from engine.offload.worker import Source, Worker

WORKERS = 2
#: Bytes of a read. One of 1 MiB reaches the device's bandwidth (measured: 2.0-3.4 GB/s); an expert of 5 MiB in
#: halves, one for each worker, decodes 10 % faster than in fifths, because every chunk takes the interpreter away from
#: the thread that computes. A demand waits for one at most.
MIN_CHUNK, MAX_CHUNK = 2**20, 2**22


class DiskLink(Link):
    """Reads experts with two workers; `bytes_per_s` is measured while it reads."""

    def __init__(self, source: Source) -> None:
        self._meter = RateMeter()
        super().__init__(source, WORKERS)

    @property
    def label(self) -> str:
        return "disk" if getattr(self.source, "direct", False) else "disk, buffered"

    @property
    def bytes_per_s(self) -> float:
        return self._meter.bytes_per_s

    def _chunk_nbytes(self) -> int:
        share = -(-self.source.expert_nbytes // (WORKERS * PAGE)) * PAGE
        return min(max(share, MIN_CHUNK), MAX_CHUNK)

    def _move(self, chunk: Chunk, worker: Worker) -> None:
        self._meter.begin()
        try:
            super()._move(chunk, worker)
        finally:
            self._meter.end(chunk.nbytes)


class RateMeter:
    """Bytes a second over the time in which at least one read ran: a decaying mean of windows of 4 MiB."""

    ASSUMED = 1e9
    WINDOW = 4 * 2**20
    WEIGHT = 0.25

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since_ns = 0
        self._bytes = 0
        self._busy_ns = 0
        self._rate: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """The mean; the first window so far while it is not full; `ASSUMED` before the first read."""
        with self._lock:
            if self._rate is not None:
                return self._rate
            return self._bytes * 1e9 / self._busy_ns if self._bytes and self._busy_ns else self.ASSUMED

    def begin(self) -> None:
        """A read starts."""
        with self._lock:
            if not self._running:
                self._since_ns = time.perf_counter_ns()
            self._running += 1

    def end(self, nbytes: int) -> None:
        """A read of `nbytes` is over."""
        with self._lock:
            now = time.perf_counter_ns()
            self._running -= 1
            busy_ns, self._since_ns = now - self._since_ns, now
        self.add(nbytes, busy_ns)

    def add(self, nbytes: int, busy_ns: int) -> None:
        """`nbytes` took `busy_ns` in which nothing else was counted."""
        with self._lock:
            self._busy_ns += busy_ns
            self._bytes += nbytes
            if self._bytes >= self.WINDOW and self._busy_ns:
                sample = self._bytes * 1e9 / self._busy_ns
                self._rate = sample if self._rate is None else self._rate + self.WEIGHT * (sample - self._rate)
                self._bytes = self._busy_ns = 0
