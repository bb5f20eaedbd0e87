"""A link's worker: one thread that lands chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from engine.offload.transfer import Chunk, Transfer

#: torch splits larger element-wise work over its thread pool, which is busy computing.
_CONVERT = 16384


class Source(Protocol):
    """What a link reads from (see `ExpertSource`)."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def expert_nbytes(self) -> int: ...

    def path(self, layer: int, expert: int) -> Path: ...

    def read(self, layer: int, expert: int, offset: int, out: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class Worker:
    """A thread that runs `work(self)`; `chunk` is what it moves, `since_ns` since when.

    A disowned worker got stuck in a read: what it brings is ignored, and it ends when it comes back. A dead one ended
    by an error outside of a read; `taken` is the transfer that it turned to last.
    """

    def __init__(self, work: Callable[[Worker], None], name: str) -> None:
        self.chunk: Chunk | None = None
        self.since_ns = 0
        self.disowned = False
        self.dead = False
        self.taken: Transfer | None = None
        self._staging: torch.Tensor | None = None
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)
        self.thread.start()

    def land(self, chunk: Chunk, source: Source) -> None:
        """Read the chunk's bytes into its destination, converted if that has another dtype than the source."""
        transfer, dtype = chunk.transfer, source.dtype
        destination = transfer.destination
        if destination.dtype == dtype:
            landing = destination.view(torch.uint8)[chunk.offset : chunk.offset + chunk.nbytes]
            source.read(transfer.layer, transfer.expert, chunk.offset, landing)
            return
        if self._staging is None or self._staging.numel() < chunk.nbytes:
            self._staging = torch.empty(chunk.nbytes, dtype=torch.uint8)
        staged = self._staging[: chunk.nbytes]
        source.read(transfer.layer, transfer.expert, chunk.offset, staged)
        values = staged.view(dtype)
        first = chunk.offset // dtype.itemsize
        landing = destination[first : first + values.numel()]
        for part, stored in zip(landing.split(_CONVERT), values.split(_CONVERT), strict=True):
            part.copy_(stored)
