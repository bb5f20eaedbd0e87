"""Main memory as slow tier: all experts in one slab, pinned where a CUDA device reads it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import BudgetError, Cancelled, one_line
from engine.kernels.pages import allocate
from engine.model.layout import ExpertTable
from engine.offload.slots import slot_nbytes
from engine.offload.source import ExpertSource

log = logging.getLogger(__name__)


class HostSlab:
    """All experts in the dtype that computes, one after the other in whole pages: no more is taken than that.

    `pinned` memory is what a CUDA device copies from at full speed while it computes. It is registered in place;
    torch's own pinned allocator would round the slab up to a power of two. Where that is refused the slab stays
    pageable, which is slower, and `refusal` says why.
    """

    def __init__(self, table: ExpertTable, dtype: torch.dtype, device: torch.device) -> None:
        """Room for the experts of `table`. Raises BudgetError when the system has none."""
        self.table = dataclasses.replace(table, shape=dataclasses.replace(table.shape.packed, dtype=dtype))
        self._stride = slot_nbytes(self.table.shape, dtype)
        nbytes = slab_nbytes(table, dtype)
        try:
            self._slab = allocate((nbytes,), torch.uint8)
        except (OSError, MemoryError) as error:
            raise no_room(nbytes, one_line(error)) from error
        #: Why it is not pinned; None if it is.
        self.refusal = pin(self._slab) if device.type == "cuda" else "no CUDA device reads it"
        if self.refusal and device.type == "cuda":
            log.warning("%.1f GiB of experts stay in pageable memory: %s", nbytes / 2**30, self.refusal)

    @classmethod
    def load(
        cls,
        source: ExpertSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> HostSlab:
        """Read every expert of `source`. `progress` is told (bytes done, bytes in total).

        Raises BudgetError, CheckpointError, Cancelled when `cancelled()` turns true.
        """
        slab = cls(source.table, dtype, device)
        table = source.table
        raw = torch.empty(source.expert_nbytes, dtype=torch.uint8)
        try:
            for done, record in enumerate(table.all()):
                if cancelled():
                    raise Cancelled("loading was cancelled")
                source.read(record.layer, record.expert, 0, raw)
                stored = table.shape.unpack(raw)
                for landing, matrix in zip(slab.weights(record.layer, record.expert), stored, strict=True):
                    landing.copy_(matrix)
                progress((done + 1) * source.expert_nbytes, table.layers * table.experts * source.expert_nbytes)
        except BaseException:
            slab.close()
            raise
        return slab

    @property
    def pinned(self) -> bool:
        """Whether a CUDA device reads it directly."""
        return self.refusal is None

    @property
    def nbytes(self) -> int:
        """Bytes of main memory that it takes."""
        return self._slab.nbytes

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert as it lies here."""
        return self.table.shape.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it lies here."""
        return self.table.shape.dtype

    def expert(self, layer: int, expert: int) -> torch.Tensor:
        """The bytes of one expert, where they lie: flat uint8."""
        first = (layer * self.table.experts + expert) * self._stride
        return self._slab[first : first + self.expert_nbytes]

    def weights(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate_up, down) of one expert, where they lie."""
        return self.table.shape.views(self.expert(layer, expert).view(self.dtype))

    def path(self, layer: int, expert: int) -> Path:
        """The file from which the expert came."""
        return self.table.records[layer][expert].segments[0].path

    def read(self, layer: int, expert: int, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (flat uint8) with the expert's bytes from `offset` on."""
        out.copy_(self.expert(layer, expert)[offset : offset + len(out)])

    def close(self) -> None:
        """Give the memory back. Nobody may be reading it."""
        if self.pinned and self._slab.nbytes:
            unpin(self._slab)
        self._slab = torch.empty(0, dtype=torch.uint8)


def slab_nbytes(table: ExpertTable, dtype: torch.dtype) -> int:
    """Bytes that a slab of all experts takes."""
    return slot_nbytes(table.shape, dtype) * table.layers * table.experts


def no_room(nbytes: int, reason: str) -> BudgetError:
    """The error for a slab of `nbytes` that main memory does not hold."""
    return BudgetError(
        f"the experts need {nbytes / 2**30:.1f} GiB of main memory ({reason}): use --link disk, or --dtype bfloat16"
    )


def pin(memory: torch.Tensor) -> str | None:
    """Let CUDA devices read the pages of `memory` directly, until `unpin`; None, or why that is not possible."""
    try:
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        return one_line(error)
    return None if status == 0 else f"cudaHostRegister failed with status {status} (is the locked memory limited?)"


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`, before the memory is given back."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
