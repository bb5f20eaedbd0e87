from __future__ import annotations

import collections
import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from engine.config import cache_directory
from engine.errors import BudgetError, Cancelled, CheckpointError
from engine.offload import pack as pack_module
from engine.offload.pack import Pack, open_pack
from engine.offload.source import PAGE

STRIDE = PAGE  # an expert of the test checkpoint has 2880 bytes


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECVIZ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


def pack_path(table) -> Path:
    return table.records[0][0].segments[0].path


def assert_good(checkpoint, table) -> None:
    raw = pack_path(table).read_bytes()
    assert len(raw) == STRIDE * table.layers * table.experts
    for layer in range(table.layers):
        for expert in range(table.experts):
            (segment,) = table.records[layer][expert].segments
            assert segment.offset % PAGE == 0 and segment.nbytes == table.shape.nbytes
            stored = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16, count=1440, offset=segment.offset)
            assert torch.equal(stored, checkpoint.flat(layer, expert))


def test_built_once_with_progress(checkpoint, cache: Path) -> None:
    told: list[tuple[int, int]] = []
    table = open_pack(checkpoint.table, checkpoint.directory, progress=lambda *p: told.append(p))
    assert_good(checkpoint, table)
    assert files(cache) == ["experts.json", "experts.pack"]
    assert told == [(n * STRIDE, 8 * STRIDE) for n in range(1, 9)]
    built = pack_path(table).stat()
    again = open_pack(checkpoint.table, checkpoint.directory, progress=lambda *p: pytest.fail("built twice"))
    assert again == table and pack_path(again).stat().st_ino == built.st_ino


@pytest.mark.parametrize("change", ["mtime", "size", "cut pack", "no header", "broken header"])
def test_a_stale_pack_is_rebuilt_and_replaced(checkpoint, cache: Path, change: str) -> None:
    table = open_pack(checkpoint.table, checkpoint.directory)
    if change == "mtime":
        os.utime(checkpoint.shards[0], ns=(1, 1))
    elif change == "size":
        with checkpoint.shards[1].open("ab") as file:
            file.write(b"x")
    elif change == "cut pack":
        os.truncate(pack_path(table), STRIDE)
    elif change == "no header":
        pack_path(table).with_name("experts.json").unlink()
    else:
        pack_path(table).with_name("experts.json").write_text("{")
    told: list[tuple[int, int]] = []
    table = open_pack(checkpoint.table, checkpoint.directory, progress=lambda *p: told.append(p))
    assert told
    assert_good(checkpoint, table)
    assert files(cache) == ["experts.json", "experts.pack"]


def test_two_builders_at_once_both_get_a_good_pack(checkpoint, cache: Path, monkeypatch) -> None:
    """Both are in the middle of writing before either finishes."""
    barrier = threading.Barrier(2, timeout=30)
    results, errors = [], []

    def build() -> None:
        waited = []

        def progress(done: int, total: int) -> None:
            if not waited:
                waited.append(barrier.wait())

        try:
            results.append(open_pack(checkpoint.table, checkpoint.directory, progress=progress))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(results) == 2 and results[0] == results[1]
    assert_good(checkpoint, results[0])
    assert files(cache) == ["experts.json", "experts.pack"]


def test_cancelling_leaves_nothing(checkpoint, cache: Path) -> None:
    asked = []
    with pytest.raises(Cancelled):
        open_pack(checkpoint.table, checkpoint.directory, cancelled=lambda: asked.append(1) or len(asked) > 3)
    assert files(cache) == []
    assert_good(checkpoint, open_pack(checkpoint.table, checkpoint.directory))


def test_a_full_disk_is_refused_before_writing(checkpoint, cache: Path, monkeypatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 8 * STRIDE - 1))
    with pytest.raises(BudgetError, match=rf"needs {8 * STRIDE} free bytes in {cache}.*SPECVIZ_CACHE"):
        open_pack(checkpoint.table, checkpoint.directory)
    assert files(cache) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_while_writing_is_cleaned_up(checkpoint, cache: Path, monkeypatch, code: int) -> None:
    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BudgetError, match="free bytes"):
        open_pack(checkpoint.table, checkpoint.directory)
    assert files(cache) == []


def test_an_unwritable_place_is_explained(checkpoint, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match="SPECVIZ_CACHE"):
        open_pack(checkpoint.table, checkpoint.directory)


def test_a_cut_shard_stops_the_build(checkpoint, cache: Path) -> None:
    os.truncate(checkpoint.shards[1], 200)
    with pytest.raises(CheckpointError, match=r"shard-1\.safetensors is cut off"):
        open_pack(checkpoint.table, checkpoint.directory)
    assert files(cache) == []


def test_what_a_killed_build_left_goes_but_a_running_one_stays(checkpoint, cache: Path) -> None:
    directory = Pack.of(checkpoint.table, checkpoint.directory).directory
    directory.mkdir(parents=True)
    old, young = directory / "experts.pack.a.tmp", directory / "experts.pack.b.tmp"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    open_pack(checkpoint.table, checkpoint.directory)
    assert not old.exists() and young.exists()


def test_other_models_packs_are_left_alone(checkpoint, cache: Path, tmp_path: Path) -> None:
    first = pack_path(open_pack(checkpoint.table, checkpoint.directory))
    second = pack_path(open_pack(checkpoint.table, tmp_path / "another-name"))
    assert first != second and first.exists() and second.exists()


def test_the_header_says_what_it_was_made_of(checkpoint, cache: Path) -> None:
    table = open_pack(checkpoint.table, checkpoint.directory)
    header = json.loads(pack_path(table).with_name("experts.json").read_text())
    assert header["shards"] == [[str(s), s.stat().st_size, s.stat().st_mtime_ns] for s in checkpoint.shards]
    assert header["expert_nbytes"] == 2880 and header["stride"] == STRIDE and header["experts"] == [2, 4]


def test_where_packs_live(monkeypatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("SPECVIZ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "specviz"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "specviz"


def test_large_experts_are_copied_in_parts(checkpoint, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(pack_module, "_CHUNK", 1000)
    assert_good(checkpoint, open_pack(checkpoint.table, checkpoint.directory))
