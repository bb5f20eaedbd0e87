"""The link from main memory to the device that computes."""

from __future__ import annotations

import time

import torch

from engine.errors import TransferError
from engine.offload.disk import RateMeter
from engine.offload.host import HostSlab
from engine.offload.links import Link
from engine.offload.streams import CopyStream, Fence, create_stream
from engine.offload.transfer import Chunk, Transfer
from engine.offload.worker import Worker

#: A third of a millisecond at 25 GB/s (PCIe 4.0): a demand waits for one at most.
CHUNK = 8 * 2**20
#: One chunk is copied while the next is handed over, so that the stream never runs dry.
WORKERS = 2


class HostLink(Link):
    """Copies experts out of `slab` on a stream of its own; times and `bytes_per_s` are those of the stream's events.

    Without a CUDA device the stream is a thread and both ends are main memory: the same path, and nothing saved.
    """

    source: HostSlab

    def __init__(self, slab: HostSlab, device: torch.device, stream: CopyStream | None = None) -> None:
        self.device = device
        self._meter = RateMeter()
        self._stream = stream or create_stream(device)
        super().__init__(slab, WORKERS)

    @property
    def label(self) -> str:
        if self.device.type != "cuda":
            return "host memory to itself (no CUDA device)"
        if self.source.pinned:
            return f"pinned host memory to {self.device}"
        return f"pageable host memory to {self.device} ({self.source.refusal})"

    @property
    def bytes_per_s(self) -> float:
        return self._meter.bytes_per_s

    def close(self) -> None:
        super().close()
        if not any(worker.thread.is_alive() for worker in self._workers):
            self._stream.close()

    def _chunk_nbytes(self) -> int:
        return CHUNK

    def _fence(self) -> Fence | None:
        # The slot may have been computed with a moment ago, and the device may not have come to that yet.
        return self._stream.fence()

    def _move(self, chunk: Chunk, worker: Worker) -> None:
        transfer, stop = chunk.transfer, chunk.offset + chunk.nbytes
        stored = self.source.expert(transfer.layer, transfer.expert)[chunk.offset : stop]
        landing = transfer.destination.view(torch.uint8)[chunk.offset : stop]
        ns = self._stream.copy(landing, stored, transfer.fence).wait()
        self._meter.add(chunk.nbytes, ns)
        if not chunk.offset:
            # Until then it waited behind other copies.
            with self._lock:
                transfer.start_ns = max(transfer.start_ns, time.perf_counter_ns() - ns)

    def _explain(self, transfer: Transfer, reason: BaseException | str) -> TransferError:
        told = reason if isinstance(reason, str) else str(reason) or type(reason).__name__
        return TransferError(
            f"expert {transfer.expert} of layer {transfer.layer} could not be copied to {self.device}: "
            f"{told.splitlines()[0]}. Load the model again, or use --link disk --device cpu"
        )
