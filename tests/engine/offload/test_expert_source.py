from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
import torch
from safetensors import safe_open

from engine.errors import CheckpointError
from engine.offload.pack import open_pack
from engine.offload.source import PAGE, ExpertSource, _File


def aligned(nbytes: int, shift: int = 0) -> torch.Tensor:
    raw = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE + shift
    return raw[start : start + nbytes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_experts_are_what_safetensors_reads(
    make_checkpoint: Callable, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, direct: bool, packed: bool
) -> None:
    checkpoint = make_checkpoint(dtype)
    monkeypatch.setenv("SPECVIZ_CACHE", str(checkpoint.directory / "cache"))
    table = open_pack(checkpoint.table, checkpoint.directory) if packed else checkpoint.table
    source = ExpertSource(table, direct=direct)
    for layer, shard in enumerate(checkpoint.shards):
        with safe_open(shard, framework="pt") as tensors:
            for expert in range(table.experts):
                out = aligned(source.expert_nbytes)
                source.read(layer, expert, 0, out)
                gate_up, down = table.shape.views(out.view(dtype))
                gate, up = gate_up.chunk(2)
                for part, value in (("gate", gate), ("up", up), ("down", down)):
                    assert torch.equal(value, tensors.get_tensor(f"{layer}.{expert}.{part}"))
    source.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 3])
def test_any_part_of_an_expert_at_any_address(checkpoint, direct: bool, shift: int) -> None:
    source = ExpertSource(checkpoint.table, direct=direct)
    whole = checkpoint.flat(1, 2).view(torch.uint8)
    for offset in (0, 1, 511, 959, 960, 961, 1919, 1921):
        for nbytes in (1, 2, 960, 2880 - offset):
            part = whole[offset : offset + nbytes]
            out = aligned(len(part), shift)
            source.read(1, 2, offset, out)
            assert torch.equal(out, part), (offset, nbytes)
    source.close()


def test_an_aligned_record_needs_no_bounce(tmp_path, monkeypatch) -> None:
    """A range that is aligned in file and memory is read by one call, straight into place."""
    path = tmp_path / "aligned"
    path.write_bytes(bytes(range(256)) * 64)
    file = _File(path, 4 * PAGE, direct=True)
    if not file.direct:
        pytest.skip("this file system refuses O_DIRECT")
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: calls.append(at) or preadv(fd, buffers, at))
    out = aligned(2 * PAGE)
    file.read(PAGE, out.numpy().data)
    assert calls == [PAGE] and bytes(out) == path.read_bytes()[PAGE : 3 * PAGE]
    file.close()


def test_file_systems_without_direct_reads_are_read_buffered(checkpoint, monkeypatch) -> None:
    real_open = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    source = ExpertSource(checkpoint.table)
    assert not source.direct
    out = torch.empty(source.expert_nbytes, dtype=torch.uint8)
    source.read(0, 1, 0, out)
    assert torch.equal(out.view(torch.bfloat16), checkpoint.flat(0, 1))
    source.close()


def test_a_missing_shard_is_named(checkpoint) -> None:
    checkpoint.shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"shard-1\.safetensors.*incomplete download"):
        ExpertSource(checkpoint.table)


def test_a_cut_shard_is_named(checkpoint) -> None:
    os.truncate(checkpoint.shards[1], checkpoint.shards[1].stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"shard-1\.safetensors is cut off.*incomplete download"):
        ExpertSource(checkpoint.table)


@pytest.mark.parametrize("direct", [True, False])
def test_a_shard_cut_while_open_is_named(checkpoint, direct: bool) -> None:
    source = ExpertSource(checkpoint.table, direct=direct)
    os.truncate(checkpoint.shards[0], 4)
    with pytest.raises(CheckpointError, match=r"shard-0\.safetensors is cut off"):
        source.read(0, 0, 0, torch.empty(source.expert_nbytes, dtype=torch.uint8))
    source.close()


def test_more_than_an_expert_is_refused(checkpoint) -> None:
    source = ExpertSource(checkpoint.table)
    with pytest.raises(CheckpointError, match="has 2880 bytes"):
        source.read(0, 0, 0, torch.empty(source.expert_nbytes + 1, dtype=torch.uint8))
    source.close()


def test_no_descriptor_is_left_open(checkpoint) -> None:
    before = len(os.listdir("/proc/self/fd"))
    ExpertSource(checkpoint.table).close()
    checkpoint.shards[1].unlink()
    with pytest.raises(CheckpointError):
        ExpertSource(checkpoint.table)
    assert len(os.listdir("/proc/self/fd")) == before
