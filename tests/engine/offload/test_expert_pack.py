from __future__ import annotations

import collections
import errno
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import cache_directory
from engine.errors import BudgetError, Cancelled, CheckpointError
from engine.model.layout import ExpertRecord, ExpertShape, ExpertTable, Segment
from engine.offload import packer
from engine.offload.pack import Pack, open_pack
from engine.offload.source import PAGE, ExpertSource

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
    """Both have begun before either finishes: one writes, the other waits for it."""
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


def stop_after(records: int) -> Callable[[], bool]:
    """A small expert is one chunk, and every chunk asks once."""
    asked = itertools.count(1)
    return lambda: next(asked) > records


def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The experts that are read from the shards from now on."""
    read: list[tuple[int, int]] = []
    honest = ExpertSource.read

    def counted(self, layer, expert, offset, out):
        read.append((layer, expert))
        honest(self, layer, expert, offset, out)

    monkeypatch.setattr(ExpertSource, "read", counted)
    return read


@pytest.mark.parametrize("records", range(9))
def test_a_cancelled_build_goes_on_where_it_stopped(checkpoint, cache: Path, monkeypatch, records: int) -> None:
    if records < 8:
        with pytest.raises(Cancelled, match="goes on from here"):
            open_pack(checkpoint.table, checkpoint.directory, cancelled=stop_after(records))
        assert files(cache) == ["experts.pack.part", "experts.pack.sums"]
    told: list[tuple[int, int]] = []
    read = copied(monkeypatch)
    table = open_pack(checkpoint.table, checkpoint.directory, progress=lambda *p: told.append(p))
    assert_good(checkpoint, table)
    assert files(cache) == ["experts.json", "experts.pack"]
    assert read == [divmod(n, 4) for n in range(records % 8, 8)]
    assert told == [(n * STRIDE, 8 * STRIDE) for n in range(1, 9)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_kill_leaves_behind_no_torn_record_is_used(checkpoint, cache: Path, data: st.DataObject) -> None:
    """Both files are cut anywhere and damaged anywhere: the pack is good in the end, and good records are kept."""
    shutil.rmtree(cache, ignore_errors=True)
    with pytest.raises(Cancelled):
        open_pack(checkpoint.table, checkpoint.directory, cancelled=stop_after(6))
    (part,), (sums,) = cache.rglob("*.part"), cache.rglob("*.sums")
    whole = 6
    for path, unit in ((part, STRIDE), (sums, 4)):
        length = data.draw(st.integers(0, path.stat().st_size))
        os.truncate(path, length)
        whole = min(whole, length // unit)
        if length and data.draw(st.booleans()):
            at = data.draw(st.integers(0, length - 1))
            raw = bytearray(path.read_bytes())
            raw[at] ^= data.draw(st.integers(1, 255))
            path.write_bytes(raw)
            whole = min(whole, at // unit)
    with pytest.MonkeyPatch.context() as patch:
        read = copied(patch)
        assert_good(checkpoint, open_pack(checkpoint.table, checkpoint.directory))
    assert read == [divmod(n, 4) for n in range(whole, 8)]


def test_a_changed_checkpoint_starts_over(checkpoint, cache: Path, monkeypatch) -> None:
    with pytest.raises(Cancelled):
        open_pack(checkpoint.table, checkpoint.directory, cancelled=stop_after(5))
    os.utime(checkpoint.shards[1], ns=(1, 1))
    read = copied(monkeypatch)
    assert_good(checkpoint, open_pack(checkpoint.table, checkpoint.directory))
    assert len(read) == 8
    assert files(cache) == ["experts.json", "experts.pack"]


def test_a_killed_process_leaves_work_that_counts(checkpoint, cache: Path, monkeypatch) -> None:
    """The real thing: another process is killed in the middle of its fifth expert."""
    ready, never = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        honest = ExpertSource.read

        def read(self, layer, expert, offset, out):
            if (layer, expert) == (1, 0):
                os.write(ready[1], b"x")
                os.read(never[0], 1)
            honest(self, layer, expert, offset, out)

        ExpertSource.read = read
        open_pack(checkpoint.table, checkpoint.directory)
        os._exit(1)
    assert os.read(ready[0], 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for handle in (*ready, *never):
        os.close(handle)
    read = copied(monkeypatch)
    assert_good(checkpoint, open_pack(checkpoint.table, checkpoint.directory))
    assert read == [(1, expert) for expert in range(4)]


def test_a_transposed_checkpoint_is_turned_once(tmp_path: Path) -> None:
    shape = ExpertShape(24, 20, torch.bfloat16, transposed=True)
    gate_up, down = torch.randn(24, 40).bfloat16(), torch.randn(20, 24).bfloat16()
    path = tmp_path / "raw"
    path.write_bytes(b"".join(m.view(torch.uint8).numpy().tobytes() for m in (gate_up, down)))
    record = ExpertRecord(0, 0, (Segment(path, 0, shape.nbytes),))
    table = open_pack(ExpertTable(shape, ((record,),)), tmp_path)
    assert not table.shape.transposed and table.shape.packed == table.shape
    raw = bytearray(pack_path(table).read_bytes())
    turned = table.shape.views(torch.frombuffer(raw, dtype=torch.bfloat16)[: shape.numel])
    assert torch.equal(turned[0], gate_up.t()) and torch.equal(turned[1], down.t())


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
    monkeypatch.setattr(packer, "_CHUNK", 1000)
    assert_good(checkpoint, open_pack(checkpoint.table, checkpoint.directory))
