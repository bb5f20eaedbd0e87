"""An emulated link: real bytes at a set pace, so that a laptop can feel like another machine."""

from __future__ import annotations

import threading
import time

from engine.offload.links import Link
from engine.offload.transfer import QUEUED, RUNNING, Chunk, Transfer
from engine.offload.worker import Source, Worker

#: One chunk takes about this long, or a quarter of an expert where that is longer: a demand overtakes within two of
#: them. More wake-ups of the worker slow down whoever computes meanwhile: at 1,000 a second a draft took 40 % longer.
CHUNK_NS = 1_000_000
CHUNKS_AN_EXPERT = 4
MIN_CHUNK, MAX_CHUNK = 2**10, 2**24

#: Late wake-ups up to this are made good by the next chunks; a source slower than the pace is not.
FORGIVEN_NS = 20_000_000


class EmulatedLink(Link):
    """Delivers at `gbps` GB/s (1e9 bytes) after `latency_us` microseconds a transfer, one transfer at a time.

    The pace is kept on a virtual clock, `_free_ns`, the time at which the link is free again: each chunk is due at
    a time computed from the last one's, not from when a thread woke up, so that delays do not add up.
    """

    emulated = True

    def __init__(self, source: Source, gbps: float, latency_us: float = 0.0) -> None:
        self._gbps, self._latency_us = gbps, latency_us
        self._free_ns = 0
        self._closing = threading.Event()
        super().__init__(source, workers=1)

    @property
    def label(self) -> str:
        gbps = float(f"{self._gbps:.3g}")  # a preset's pace has no more digits that mean anything
        return f"emulated {gbps:g} GB/s" + (f", {self._latency_us:g} µs" if self._latency_us else "")

    @property
    def bytes_per_s(self) -> float:
        return self._gbps * 1e9

    @property
    def gbps(self) -> float:
        """GB/s (1e9 bytes)."""
        return self._gbps

    @property
    def latency_us(self) -> float:
        """Microseconds before the first byte of each transfer."""
        return self._latency_us

    def set_rate(self, gbps: float, latency_us: float) -> None:
        """A new pace from the next chunk, a new latency from the next transfer on."""
        with self._lock:
            self._gbps, self._latency_us = gbps, latency_us

    def close(self) -> None:
        self._closing.set()
        super().close()

    def _latency_ns(self) -> int:
        return int(self._latency_us * 1e3)

    def _chunk_nbytes(self) -> int:
        # A multiple of 16 bytes keeps elements of any dtype whole.
        nbytes = max(self.bytes_per_s * CHUNK_NS / 1e9, self.source.expert_nbytes / CHUNKS_AN_EXPERT)
        return int(min(MAX_CHUNK, max(MIN_CHUNK, nbytes))) // 16 * 16

    def _cut(self, transfer: Transfer) -> Chunk:
        # A transfer submitted to an idle link starts then, not when the worker woke up.
        begin_ns = max(self._free_ns, transfer.queued_ns)
        if transfer.state == QUEUED:
            transfer.state, transfer.start_ns = RUNNING, begin_ns
        if transfer.latency_ns:
            waited = min(transfer.latency_ns, CHUNK_NS)
            transfer.latency_ns -= waited
            chunk = Chunk(transfer, transfer.issued, 0, begin_ns + waited)
        else:
            nbytes = min(self._chunk_nbytes(), transfer.nbytes - transfer.issued)
            due_ns = begin_ns + -int(-nbytes * 1e9 // self.bytes_per_s)
            chunk = Chunk(transfer, transfer.issued, nbytes, due_ns)
            transfer.issued += nbytes
        self._free_ns = chunk.due_ns
        return chunk

    def _move(self, chunk: Chunk, worker: Worker) -> None:
        if chunk.nbytes:
            super()._move(chunk, worker)
        while (left_ns := chunk.due_ns - time.perf_counter_ns()) > 0 and not self._closing.wait(left_ns / 1e9):
            pass
        with self._lock:
            if not worker.disowned:
                self._free_ns = max(self._free_ns, time.perf_counter_ns() - FORGIVEN_NS)
