"""The expert pack: a page-aligned file with one contiguous record an expert, built once for each checkpoint.

Shards keep an expert in up to three places at odd offsets, and some keep it transposed. In the pack it is one aligned
range, so that the disk link reads it with O_DIRECT straight into its slot. A build that was stopped goes on where it
stopped.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine.config import cache_directory
from engine.errors import BudgetError, CheckpointError
from engine.model.layout import ExpertRecord, ExpertTable, Segment
from engine.offload.packer import check, write_records
from engine.offload.partial import PartialFile, alone
from engine.offload.source import PAGE

FORMAT = 2
_STALE_TEMPORARY_S = 3600


def open_pack(
    table: ExpertTable,
    model: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> ExpertTable:
    """`table` with its records in the pack, which is built first when it is missing or stale.

    A pack belongs to one `model` path and to the names, sizes and modification times of its shards.
    `progress` is told (done bytes, total bytes) while it is built. Raises BudgetError when the disk lacks
    room, Cancelled when `cancelled()` turns true, CheckpointError when a shard is missing or cut off. What a cancelled
    or killed build wrote is checked and kept by the next one.
    """
    pack = Pack.of(table, Path(model))
    if not pack.is_complete():
        pack.build(table, progress or (lambda done, total: None), cancelled or (lambda: False))
    return pack.table(table)


@dataclass(frozen=True)
class Pack:
    """Where the pack of one checkpoint lies, and what its header must say."""

    directory: Path
    header: dict[str, object]
    stride: int
    count: int

    @classmethod
    def of(cls, table: ExpertTable, model: Path) -> Pack:
        """The pack that belongs to `table`'s shards as they are now. Raises CheckpointError if one is missing."""
        stride = -(-table.shape.packed.nbytes // PAGE) * PAGE
        header: dict[str, object] = {
            "format": FORMAT,
            "model": str(model.resolve()),
            "shards": _shards(table),
            "layout": _digest([[[str(s.path), s.offset, s.nbytes] for s in r.segments] for r in table.all()]),
            "experts": [table.layers, table.experts],
            "expert_nbytes": table.shape.nbytes,
            "stride": stride,
        }
        directory = cache_directory() / "packs" / f"{_digest(header['model'])[:12]}-{_digest(header)[:12]}"
        return cls(directory, header, stride, table.layers * table.experts)

    @property
    def path(self) -> Path:
        return self.directory / "experts.pack"

    @property
    def header_path(self) -> Path:
        return self.directory / "experts.json"

    @property
    def nbytes(self) -> int:
        return self.stride * self.count

    def is_complete(self) -> bool:
        """Whether the pack is there in full. The header is written last: without it nothing counts."""
        try:
            return json.loads(self.header_path.read_text()) == self.header and self.path.stat().st_size == self.nbytes
        except (OSError, ValueError):
            return False

    def table(self, table: ExpertTable) -> ExpertTable:
        """`table` with each expert as one aligned segment of the pack, its matrices the right way round."""
        records = []
        for layer in range(table.layers):
            first = layer * table.experts
            segments = (
                Segment(self.path, (first + expert) * self.stride, table.shape.packed.nbytes)
                for expert in range(table.experts)
            )
            records.append(tuple(ExpertRecord(layer, expert, (segment,)) for expert, segment in enumerate(segments)))
        return ExpertTable(table.shape.packed, tuple(records))

    def build(self, table: ExpertTable, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """Write what is missing of the pack, then its header. Somebody else who builds it already is waited for.

        What is written stays when it is cancelled or killed, but not when it fills the disk.
        """
        partial = PartialFile(self.path, self.stride)

        def waiting() -> None:
            check(cancelled)
            progress(min(partial.nbytes, self.nbytes), self.nbytes)

        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with alone(self.directory, waiting):
                if self.is_complete():
                    return
                self._clear_away()
                write_records(table, partial, progress, cancelled)
                partial.finish()
                with _replacing(self.header_path) as file:
                    file.write(json.dumps(self.header, indent=1).encode())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise BudgetError(
                    f"the expert pack needs {self.nbytes} free bytes in {self.directory}: free some, "
                    "set SPECVIZ_CACHE to a larger disk, or run without the pack"
                ) from error
            raise CheckpointError(
                f"cannot write the expert pack in {self.directory}: {error.strerror}; set SPECVIZ_CACHE "
                "to a directory that you may write to, or run without the pack"
            ) from error

    def _clear_away(self) -> None:
        """Remove packs of the same model's older shards, and what a killed build left behind here."""
        model = self.directory.name.partition("-")[0]
        for stale in self.directory.parent.glob(f"{model}-*"):
            if stale != self.directory:
                shutil.rmtree(stale, ignore_errors=True)
        for leftover in self.directory.glob("*.tmp"):
            with suppress(FileNotFoundError):
                # A build that is alive writes all the time.
                if time.time() - leftover.stat().st_mtime > _STALE_TEMPORARY_S:
                    leftover.unlink()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is whole and on disk; removed on any error."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _shards(table: ExpertTable) -> list[list[object]]:
    """Name, size and modification time of each shard."""
    shards = []
    for path in sorted({segment.path for record in table.all() for segment in record.segments}):
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror} (incomplete download?)") from error
        shards.append([str(path), status.st_size, status.st_mtime_ns])
    return shards


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
