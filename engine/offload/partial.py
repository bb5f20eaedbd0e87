"""A large file of equal records that is written in as many goes as it takes, and used only once it is whole."""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_READ = 4 * 2**20
_POLL_S = 0.1
_SUM = 4


class PartialFile:
    """`path` in the making: records of `stride` bytes in a file beside it, and a checksum of each in another.

    A record counts when the bytes that are there have its checksum, whatever a killed process or a power cut left
    behind. Use it inside `alone`.
    """

    def __init__(self, path: Path, stride: int) -> None:
        self.stride = stride
        self.directory = path.parent
        self._path = path
        self._data = path.with_name(f"{path.name}.part")
        self._sums = path.with_name(f"{path.name}.sums")

    @property
    def nbytes(self) -> int:
        """Bytes on disk, whether good or not."""
        return self._data.stat().st_size if self._data.exists() else 0

    def good(self, verified: Callable[[int], None]) -> int:
        """How many records are whole; the rest is cut off. `verified(n)` is called as each proves good."""
        if not (self._data.exists() and self._sums.exists()):
            self.discard()
            return 0
        count = 0
        with self._data.open("r+b") as data, self._sums.open("r+b") as sums:
            while (stored := sums.read(_SUM)) and int.from_bytes(stored, "little") == self._sum(data):
                count += 1
                verified(count)
            data.truncate(count * self.stride)
            sums.truncate(count * _SUM)
        return count

    def append(self, records: Iterable[Iterable[memoryview]], written: Callable[[], None]) -> None:
        """Write records, each of which comes in pieces that make `stride` bytes; `written()` after each."""
        with self._data.open("ab") as data, self._sums.open("ab") as sums:
            for pieces in records:
                checksum = 0
                for piece in pieces:
                    data.write(piece)
                    checksum = zlib.crc32(piece, checksum)
                # In this order, so that a killed process seldom leaves a checksum of what is not there.
                data.flush()
                sums.write(checksum.to_bytes(_SUM, "little"))
                sums.flush()
                written()
            os.fsync(data.fileno())

    def finish(self) -> None:
        """Everything is written: take the place of `path`."""
        os.replace(self._data, self._path)
        self._sums.unlink()

    def discard(self) -> None:
        """Forget what was written."""
        self._data.unlink(missing_ok=True)
        self._sums.unlink(missing_ok=True)

    def _sum(self, data: BinaryIO) -> int | None:
        """The checksum of the next record; None if the file ends before it does."""
        checksum, left = 0, self.stride
        while left:
            piece = data.read(min(left, _READ))
            if not piece:
                return None
            checksum = zlib.crc32(piece, checksum)
            left -= len(piece)
        return checksum


@contextmanager
def alone(directory: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Nobody else, thread or process, is inside for `directory`; `waiting()` is called while somebody is.

    The system lets go of the lock when a process dies. Raises OSError where the file system knows no locks.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)
