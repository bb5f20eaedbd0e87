"""A checkpoint that appears complete or not at all, and shards that are written one after another."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.errors import BudgetError
from engine.model.checkpoint import INDEX_NAME

#: Bytes of one shard.
SHARD = 400_000_000


@contextmanager
def new_checkpoint(directory: Path, need: int, advice: str) -> Iterator[Path]:
    """An empty directory to fill, which becomes `directory` at the end; after any error nothing is left of it.

    Raises BudgetError with `advice` when the disk has less than `need` bytes free, and when a write fails.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory.parent).free
    except OSError as error:
        raise BudgetError(f"cannot write {directory}: {error.strerror}") from error
    if free < need:
        raise BudgetError(f"{directory.parent} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed: {advice}")
    partial = directory.with_name(f"{directory.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir()
        yield partial
        os.replace(partial, directory)
    except OSError as error:
        raise BudgetError(f"cannot write {directory}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise BudgetError(f"cannot write {directory}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class ShardWriter:
    """Writes named tensors as safetensors shards of about `shard_bytes`; at most one shard is in memory."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last shard and the index that names the shard of every tensor."""
        self._flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            shard = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            os.replace(self._unnumbered(number), self._directory / shard)
            weight_map |= dict.fromkeys(names, shard)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=1))

    def _flush(self) -> None:
        self._shards.append(list(self._waiting))
        save_file(self._waiting, self._unnumbered(len(self._shards)), metadata={"format": "pt"})
        self._total_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def _unnumbered(self, number: int) -> Path:
        """The name of a shard while nobody knows how many there will be."""
        return self._directory / f"model-{number:05}.safetensors"
