"""The slow tier: reads the bytes of one expert, whole or in part, from the files that hold them."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.model.layout import ExpertTable, Segment

#: O_DIRECT wants file offset, length and address to be multiples of the device's block; a page always suffices.
PAGE = 4096

_INCOMPLETE = "incomplete download? Fetch the model again"


class ExpertSource:
    """Reads experts from the segments that `table` gives: byte ranges of the shards, or records of a pack.

    `direct` asks for O_DIRECT, which leaves the page cache and the processor alone; where a file system
    refuses it, reads are buffered. Safe to use from several threads. Raises CheckpointError when a file is
    missing or shorter than the table says.
    """

    def __init__(self, table: ExpertTable, *, direct: bool = True) -> None:
        self.table = table
        ends: dict[Path, int] = {}
        for record in (record for layer in table.records for record in layer):
            for segment in record.segments:
                ends[segment.path] = max(ends.get(segment.path, 0), segment.offset + segment.nbytes)
        self._files: dict[Path, _File] = {}
        try:
            for path, end in ends.items():
                self._files[path] = _File(path, end, direct)
        except CheckpointError:
            self.close()
            raise

    @property
    def expert_nbytes(self) -> int:
        """Stored bytes of one expert."""
        return self.table.shape.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""
        return self.table.shape.dtype

    @property
    def direct(self) -> bool:
        """Whether every file is read with O_DIRECT."""
        return all(file.direct for file in self._files.values())

    def path(self, layer: int, expert: int) -> Path:
        """The file in which the expert begins, to name in messages."""
        return self.table.records[layer][expert].segments[0].path

    def read(self, layer: int, expert: int, offset: int, out: torch.Tensor) -> None:
        """Fill `out` (flat uint8) with the expert's stored bytes from `offset` on.

        Raises CheckpointError when the file ends too early or the device fails.
        """
        view = out.numpy().data
        start = 0
        for segment in self.table.records[layer][expert].segments:
            stop = start + segment.nbytes
            low, high = max(start, offset), min(stop, offset + len(view))
            if low < high:
                self._read_part(segment, low - start, view[low - offset : high - offset])
            start = stop
        if offset + len(view) > start:
            raise CheckpointError(f"expert {expert} of layer {layer} has {start} bytes, not {offset + len(view)}")

    def _read_part(self, segment: Segment, offset: int, out: memoryview) -> None:
        self._files[segment.path].read(segment.offset + offset, out)

    def close(self) -> None:
        """Close the files. No read may be running."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class _File:
    """One file, opened for O_DIRECT when `direct` and the file system allow it."""

    def __init__(self, path: Path, end: int, direct: bool) -> None:
        self.path = path
        self._bounce = threading.local()
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            self._fd = self._open()
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror} ({_INCOMPLETE})") from error
        size = os.fstat(self._fd).st_size
        if size < end:
            self.close()
            raise CheckpointError(f"{path} is cut off: {size} bytes where {end} are needed ({_INCOMPLETE})")

    def _open(self) -> int:
        if self.direct:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, out: memoryview) -> None:
        if not self.direct:
            self._fill(offset, out, len(out))
            return
        address = torch.frombuffer(out, dtype=torch.uint8).data_ptr()
        if not (offset | len(out) | address) % PAGE:
            self._fill(offset, out, len(out))
            return
        head = offset % PAGE
        span = -(-(head + len(out)) // PAGE) * PAGE
        bounce = self._bounce_buffer(span)
        self._fill(offset - head, bounce[:span], head + len(out))
        out[:] = bounce[head : head + len(out)]

    def _bounce_buffer(self, nbytes: int) -> memoryview:
        """This thread's page-aligned buffer of at least `nbytes`."""
        buffer: memoryview | None = getattr(self._bounce, "buffer", None)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._bounce.buffer = memoryview(mmap.mmap(-1, nbytes))
        return buffer

    def _fill(self, offset: int, out: memoryview, needed: int) -> None:
        """Read into `out` until `needed` bytes of it are there; the last page of a file may be short."""
        done = 0
        while done < needed:
            try:
                got = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {offset + done}: {error.strerror} "
                    "(check the disk, or fetch the model again)"
                ) from error
            if not got:
                raise CheckpointError(f"{self.path} is cut off at byte {offset + done} ({_INCOMPLETE})")
            done += got

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
