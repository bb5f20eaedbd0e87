"""Benches: what their reports hold, and that ratios and bars follow from the figures. No speeds are asserted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from engine import machine
from engine.bench import expert_jobs
from engine.bench import roof as roof_module
from engine.bench.attention_jobs import AttentionSize, attention_jobs
from engine.bench.expert_jobs import ExpertSize, plain_jobs, quantized_jobs
from engine.bench.kernels import Sizes, format_kernels, kernels_suite
from engine.bench.roof import Roof, stream_bytes
from engine.bench.table import format_neighbours
from engine.bench.timing import Rival, best_seconds, largest_difference
from engine.errors import EngineError
from engine.kernels.native import Absent, Native, native
from engine.kernels.pages import allocate, copies
from engine.machine import available_bytes, caches, last_level_bytes

TINY = Sizes(
    attention=(AttentionSize(1, 3, 40, heads=4, kv_heads=2, dim=16), AttentionSize(3, 2, 17, 4, 4, 8, ratio=5.0)),
    experts=(ExpertSize(64, 32, 2, "tiny"),),
    plain_rows=(1, 3),
    quantized_rows=(1, 3),
    stream_bytes=200_000,
    repeats=2,
    window_s=1e-4,
)


@pytest.fixture(scope="module")
def kernels() -> Native:
    found = native()
    if isinstance(found, Absent):
        pytest.skip(f"no compiled kernels: {found.reason}")
    return found


@pytest.fixture(scope="module")
def report(kernels) -> dict:
    said: list[str] = []
    made = kernels_suite(TINY, 1, said.append)
    assert len(said) == len({(row["job"], row["state"]) for row in made["rows"]})
    return made


def test_the_kernels_report_is_plain_json(report: dict):
    assert json.loads(json.dumps(report)) == report
    assert report["suite"] == "kernels"
    assert report["machine"]["threads"] == 1 and report["machine"]["kernels"] in native().variants
    assert report["roof"]["streamed_bytes"] == TINY.stream_bytes and report["roof"]["streamed_gbps"] > 0


def test_every_size_is_measured_by_every_rival(report: dict):
    by_job: dict[tuple[str, str], list[dict]] = {}
    for row in report["rows"]:
        by_job.setdefault((row["job"], row["state"]), []).append(row)
    attention = [rows for (job, _), rows in by_job.items() if job.startswith("attention")]
    assert len(attention) == 4  # both sizes, streamed and cache-resident
    for rows in attention:
        assert [row["name"] for row in rows] == ["chunked_attention", "scaled_dot_product_attention", "grouped matmul"]
    assert {job for job, _ in by_job if "experts" in job} == {
        f"{kind} experts 64×32, {rows}" for kind in ("bfloat16", "INT4") for rows in ("1 row", "3 rows")
    }
    for rows in by_job.values():
        assert [row["ours"] for row in rows] == [True] + [False] * (len(rows) - 1)


def test_ratios_and_shares_follow_from_the_times(report: dict):
    for row in report["rows"]:
        rivals = [other for other in report["rows"] if (other["job"], other["state"]) == (row["job"], row["state"])]
        base = next(other for other in rivals if other["name"] == row["base"])
        assert row["ratio"] == pytest.approx(base["seconds"] / row["seconds"])
        assert row["gbps"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["roof_share"] == pytest.approx(row["gbps"] / row["roof_gbps"])
        if row["state"] == "streamed":
            assert row["roof_gbps"] == report["roof"]["streamed_gbps"]
        if row["job"].startswith("attention"):
            assert row["base"] == "scaled_dot_product_attention"
        else:
            same_job = [other for other in rivals if not other["ours"] and "repacked" not in other["name"]]
            assert base["seconds"] == min(other["seconds"] for other in same_job)


def test_bars_are_those_that_were_asked(report: dict):
    own = {f"{row['job']}, {row['state']}": row for row in report["rows"] if row["ours"]}
    asked = {}
    for bar in report["bars"]:
        where, what = bar["name"].split(": ")
        figure = "roof_share" if what == "share of the read roof" else "ratio"
        assert bar["value"] == own[where][figure]
        assert bar["rule"] == "at least" and bar["holds"] == (bar["value"] >= bar["bar"])
        asked.setdefault(where, {})[figure] = bar["bar"]
    assert asked["attention, 3 rows, 40 tokens, streamed"] == {"ratio": 4.0, "roof_share": 0.6}
    assert asked["attention, batch 3, 2 rows, 17 tokens, cache-resident"] == {"ratio": 5.0, "roof_share": 0.6}
    assert asked["bfloat16 experts 64×32, 3 rows, streamed"] == {"ratio": 2.0, "roof_share": 0.6}
    assert asked["INT4 experts 64×32, 1 row, streamed"] == {"roof_share": 0.5}
    assert asked["INT4 experts 64×32, 3 rows, streamed"] == {"ratio": 2.0}


def test_the_kernels_table_shows_every_row_and_bar(report: dict):
    text = format_kernels(report)
    for row in report["rows"]:
        assert row["job"] in text and row["name"] in text and f"{row['ratio']:.2f}" in text
    assert all(bar["name"] in text for bar in report["bars"])


def test_rivals_do_the_same_job(kernels):
    sizes = (ExpertSize(96, 64, 2, "tiny"),)
    jobs = [
        *attention_jobs((AttentionSize(2, 3, 70, heads=4, kv_heads=2, dim=24),), 100_000),
        *plain_jobs(sizes, (1, 5), 100_000),
        *quantized_jobs(sizes, (1, 5), 100_000),
    ]
    assert len(jobs) == 6
    for job in jobs:
        # bfloat16 has 8 bits, and results here are sums of up to 96 products.
        assert largest_difference(job) < 0.03, job.name


def test_streamed_pieces_are_distinct_memory():
    size = ExpertSize(32, 16, 1, "tiny")
    layers = expert_jobs._slabs(size, expert_jobs._plain(size), 10_000)
    wanted = -(-10_000 // size.nbytes)
    first = layers.next()[0].data_ptr()
    others = [layers.next()[0].data_ptr() for _ in range(wanted)]
    assert len({first, *others}) == wanted and others[-1] == first


def test_the_best_window_counts():
    calls = iter(range(10**6))

    def call() -> torch.Tensor:
        next(calls)
        return torch.zeros(())

    seconds = best_seconds([Rival("a", call, 1), Rival("b", call, 1)], repeats=3, window_s=0)
    assert len(seconds) == 2 and min(seconds) > 0
    # Two calls a window, a first window each, and three more.
    assert next(calls) == 2 * 2 * (1 + 3)


def test_the_roof_reads_every_byte(kernels):
    roof = Roof(kernels, 1 << 20)
    roof.sample(1)
    assert roof.streamed > 0 and roof.resident([torch.ones(1000)], 1) > 0
    for size in (0, 1, 63, 64, 65, 1000, (1 << 18) + 7):
        values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        total = kernels.library.specviz_read(values.data_ptr(), size)
        whole = values[: size // 64 * 64].view(torch.int64).sum().item() if size >= 64 else 0
        assert total == (whole + int(values[size // 64 * 64 :].sum())) % 2**64


def test_caches_are_found(tmp_path: Path):
    for number, (kind, level, size) in enumerate(
        (("Data", 1, "48K"), ("Instruction", 1, "99M"), ("Unified", 2, "2048K"), ("Unified", 3, "480M"))
    ):
        index = tmp_path / f"index{number}"
        index.mkdir()
        for name, text in (("type", kind), ("level", level), ("size", size)):
            (index / name).write_text(f"{text}\n")
    assert caches(tmp_path) == [
        {"level": 1, "bytes": 48 << 10}, {"level": 2, "bytes": 2 << 20}, {"level": 3, "bytes": 480 << 20},
    ]  # fmt: skip
    assert last_level_bytes(tmp_path) == 480 << 20
    assert last_level_bytes(tmp_path / "absent") == 32 << 20
    assert available_bytes() > 1 << 20


def test_streams_outgrow_the_cache_but_not_the_memory(monkeypatch):
    monkeypatch.setattr(roof_module, "last_level_bytes", lambda: 32 << 20)
    monkeypatch.setattr(roof_module, "available_bytes", lambda: 100 << 30)
    assert stream_bytes() == 512 << 20
    monkeypatch.setattr(roof_module, "last_level_bytes", lambda: 256 << 20)
    assert stream_bytes() == 1 << 30
    monkeypatch.setattr(roof_module, "available_bytes", lambda: 1 << 30)
    assert stream_bytes() == int(0.15 * 2**30)


def test_neighbours_are_noticed(tmp_path: Path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "_PROC_STAT", stat)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    clock = iter((100.0, 110.0))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    own = iter(((1, 1, 0, 0, 0), (8, 2, 0, 0, 0)))  # this process works for 8 seconds more
    monkeypatch.setattr(machine.os, "times", lambda: os.times_result(next(own)))
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    stat.write_text("cpu  1000 0 500 90000 70 0 0 0 0 0\ncpu0 1 2 3\n")
    neighbours = machine.Neighbours()
    stat.write_text("cpu  2000 100 900 99000 99 0 0 100 0 0\ncpu0 1 2 3\n")
    # All cores together 16 seconds of work, 8 of them not ours, of 4 cores × 10 seconds.
    assert neighbours.share() == pytest.approx(0.2)
    assert "20 %" in format_neighbours({"others_cpu_share": 0.2})[0].replace("%", " %")
    assert format_neighbours({"others_cpu_share": 0.01}) == format_neighbours({"others_cpu_share": None}) == []


def test_where_the_system_does_not_tell_there_are_no_neighbours(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(machine, "_PROC_STAT", tmp_path / "absent")
    assert machine.Neighbours().share() is None


@pytest.mark.parametrize("shape", ((), (3,), (0, 4), (5, 7, 11), (3, 1 << 20)))
def test_pages_of_ones_own(shape: tuple[int, ...]):
    memory = allocate(shape, torch.bfloat16)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == (shape, torch.bfloat16, True)
    values = torch.randn(4, 5)
    many = copies(values, 2, 3)
    assert torch.equal(many, values.expand(2, 3, 4, 5))
    many[0, 0] = 0
    assert torch.equal(many[1, 2], values)


def test_no_kernels_no_bench(monkeypatch):
    monkeypatch.setenv("SPECVIZ_KERNELS", "off")
    with pytest.raises(EngineError, match="switched off"):
        kernels_suite(TINY, 1, lambda line: None)
