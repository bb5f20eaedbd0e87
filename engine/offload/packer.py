"""Writing the records of a pack: read from the shards, turned or unpacked if need be, padded to whole pages."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing

import torch

from engine.errors import Cancelled
from engine.model.layout import ExpertRecord, ExpertTable
from engine.offload.partial import PartialFile
from engine.offload.source import ExpertSource

_CHUNK = 4 * 2**20


def write_records(
    table: ExpertTable, partial: PartialFile, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
) -> None:
    """Write the experts of `table` that `partial` lacks. Raises OSError, after which nothing is left, and Cancelled,
    after which all that is whole stays.
    """
    total = table.layers * table.experts * partial.stride

    def verified(count: int) -> None:
        check(cancelled)
        progress(count * partial.stride, total)

    with closing(ExpertSource(table, direct=False)) as source:
        try:
            done = partial.good(verified)
            if shutil.disk_usage(partial.directory).free < total - done * partial.stride:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            counts = itertools.count(done + 1)
            missing = itertools.islice(table.all(), done, None)
            partial.append(
                (_pieces(source, record, partial.stride, cancelled) for record in missing),
                lambda: progress(next(counts) * partial.stride, total),
            )
        except OSError:
            partial.discard()
            raise


def check(cancelled: Callable[[], bool]) -> None:
    """Raise Cancelled if it is."""
    if cancelled():
        raise Cancelled("building the expert pack was cancelled: the next start goes on from here")


def _pieces(
    source: ExpertSource, record: ExpertRecord, stride: int, cancelled: Callable[[], bool]
) -> Iterator[memoryview]:
    """The `stride` bytes of one record. A piece is valid until the next."""
    shape = source.table.shape
    as_it_is = shape == shape.packed
    # What is written as it is read needs no more memory than a chunk; what is converted must be whole.
    buffer = torch.empty(min(_CHUNK, shape.nbytes) if as_it_is else shape.nbytes, dtype=torch.uint8)
    for offset in range(0, shape.nbytes, _CHUNK):
        check(cancelled)
        start = 0 if as_it_is else offset
        part = buffer[start : start + min(_CHUNK, shape.nbytes - offset)]
        source.read(record.layer, record.expert, offset, part)
        if as_it_is:
            yield part.numpy().data
    if not as_it_is:
        for matrix in shape.unpack(buffer):
            yield matrix.contiguous().view(torch.uint8).flatten().numpy().data
    yield memoryview(bytes(stride - shape.packed.nbytes))
