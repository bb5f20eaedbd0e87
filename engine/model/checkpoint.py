"""A checkpoint as it lies on disk: which tensor is where, checked before anything large is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError, ModelError
from engine.model.layout import Segment

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# A header larger than this is not a header (the format allows 100 MB; real ones are a few MB).
MAX_HEADER_BYTES = 100_000_000

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a shard: `segment` are its raw bytes, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    segment: Segment


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a local checkpoint directory, by name."""

    directory: Path
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the index and every shard's header.

        Raises CheckpointError when a shard is missing, cut off or unreadable, or when the index names
        tensors that no shard holds.
        """
        index_path = directory / INDEX_NAME
        if index_path.exists():
            weight_map = _weight_map(index_path)
            shards = [directory / name for name in sorted(set(weight_map.values()))]
        else:
            weight_map = {}
            shards = [directory / SINGLE_NAME]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise CheckpointError(
                f"{directory} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}: "
                "incomplete download? Fetch the checkpoint again (safetensors files are needed)"
            )
        tensors = {info.name: info for shard in shards for info in read_header(shard)}
        absent = sorted(set(weight_map) - set(tensors))
        if absent:
            raise CheckpointError(
                f"the shards of {directory} do not hold {absent[0]}"
                f"{f' and {len(absent) - 1} more tensors' if len(absent) > 1 else ''} that the index names: "
                "shards of different downloads? Fetch the checkpoint again"
            )
        return cls(directory, tensors)

    def read(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, shard by shard, each in its stored dtype. Raises CheckpointError."""
        by_shard: dict[Path, list[str]] = {}
        for name in names:
            by_shard.setdefault(self.tensors[name].segment.path, []).append(name)
        for path, wanted in by_shard.items():
            try:
                with safe_open(path, framework="pt") as shard:
                    for name in wanted:
                        yield name, shard.get_tensor(name)
            except SafetensorError as error:
                raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, from its header alone. Raises CheckpointError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is cut off or not a safetensors file ({size} bytes): fetch it again")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [_tensor(path, 8 + length, name, entry) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has an unreadable header ({error}): fetch it again") from error
    end = max((info.segment.offset + info.segment.nbytes for info in tensors), default=0)
    if end > size:
        raise CheckpointError(f"{path} is cut off: {size} bytes of {end}: incomplete download? Fetch it again")
    return tensors


def _tensor(path: Path, data: int, name: str, entry: dict) -> TensorInfo:
    """One entry of the header of `path`, whose tensors start at byte `data`. Raises ValueError if it makes no sense."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not 0 <= begin <= end or any(side < 0 for side in shape):
        raise ValueError(f"{name} lies from byte {begin} to {end}")
    return TensorInfo(name, entry["dtype"], shape, Segment(path, data + begin, end - begin))


def resolve_directory(model: str) -> Path:
    """A local directory as it is; anything else is a hub id, fetched (or found) in the hub's own cache.

    Raises ModelError when there is neither.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists() or model.startswith(("/", "./", "../", "~")) or model.count("/") != 1:
        raise ModelError(f"no model at {model}: give a directory with config.json and safetensors files, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]))
    except Exception as error:  # the hub raises a dozen unrelated types; the message is what the user needs
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot fetch {model} from the hub ({reason}): give a local directory instead") from error


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name → shard name, from the index at `path`."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch it again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{path} has no map of weights to shards: fetch it again")
    return weight_map
