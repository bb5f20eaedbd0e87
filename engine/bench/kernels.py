"""The kernels suite: each compiled kernel against torch's best for the same job, and against the read roof."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from engine.bench.attention_jobs import AttentionSize, attention_jobs
from engine.bench.expert_jobs import ExpertSize, plain_jobs, quantized_jobs
from engine.bench.roof import Roof, give_memory_back, stream_bytes
from engine.bench.table import at_least, format_bars, format_columns, format_neighbours
from engine.bench.timing import Bar, Job, best_seconds, largest_difference
from engine.errors import EngineError
from engine.kernels.native import Absent, native
from engine.machine import Neighbours, caches, last_level_bytes
from engine.report import machine_info


@dataclass(frozen=True)
class Sizes:
    """What is measured, and for how long. `stream_bytes` None: by this machine's cache and free memory."""

    attention: tuple[AttentionSize, ...] = (
        AttentionSize(1, 5, 2048),
        AttentionSize(1, 9, 2048),
        AttentionSize(1, 5, 8192),
        AttentionSize(1, 9, 8192),
        AttentionSize(32, 6, 640, ratio=5.0),
    )
    experts: tuple[ExpertSize, ...] = (
        ExpertSize(192, 128, 2, "stories-moe"),
        ExpertSize(576, 1536, 2, "Mixtral-8x135M"),
        ExpertSize(2048, 1024, 8, "OLMoE-1B-7B"),
        ExpertSize(4096, 14336, 2, "Mixtral-8x7B"),
    )
    plain_rows: tuple[int, ...] = (1, 5)
    quantized_rows: tuple[int, ...] = (1, 5, 9, 16)
    stream_bytes: int | None = None
    repeats: int = 5
    window_s: float = 0.04


def kernels_suite(sizes: Sizes, threads: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Ours against torch for attention and experts, with equal rows, values and threads.

    Raises EngineError when this machine has no compiled kernels.
    """
    kernels = native()
    if isinstance(kernels, Absent):
        raise EngineError(f"there are no compiled kernels to measure: {kernels.reason}")
    threads = threads or len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    kernels.set_threads(threads)
    torch.set_num_threads(threads)
    try:
        neighbours = Neighbours()
        nbytes = sizes.stream_bytes or stream_bytes()
        roof = Roof(kernels, nbytes)

        def measure(job: Job) -> Measured:
            say(f"{job.name}, {job.state}")
            return _measure(job, roof, sizes)

        # map, and no loop variable: a job's memory must be free before the next is made.
        with torch.inference_mode():
            measured = list(map(measure, _jobs(sizes, nbytes)))
        roof.sample()
        machine = machine_info() | {"kernels": kernels.variant, "caches": caches()}
        machine |= {"others_cpu_share": neighbours.share()}
    finally:
        torch.set_num_threads(before)
    rows = [row for job in measured for row in job.rows(roof.streamed)]
    return {
        "suite": "kernels",
        "machine": machine,
        "roof": {
            "streamed_gbps": roof.streamed,
            "streamed_bytes": nbytes,
            "last_level_cache_bytes": last_level_bytes(),
        },
        "repeats": sizes.repeats,
        "rows": rows,
        "bars": [bar for job in measured for bar in job.bars(roof.streamed)],
    }


@dataclass(frozen=True)
class Measured:
    """One job's outcome, without its memory. `seconds`: a call of each rival. `roof_gbps`: only if cache-resident."""

    name: str
    state: str
    rivals: list[tuple[str, int, bool]]
    seconds: list[float]
    base: int
    asked: list[Bar]
    difference: float
    roof_gbps: float | None

    def rows(self, streamed_gbps: float) -> list[dict[str, Any]]:
        """One row a rival; `ratio` is the base's time over its own."""
        roof = self.roof_gbps or streamed_gbps
        rows = []
        for (name, nbytes, ours), seconds in zip(self.rivals, self.seconds, strict=True):
            gbps = nbytes / seconds / 1e9
            rows.append({
                "job": self.name,
                "state": self.state,
                "name": name,
                "ours": ours,
                "bytes": nbytes,
                "seconds": seconds,
                "gbps": gbps,
                "roof_gbps": roof,
                "roof_share": gbps / roof,
                "base": self.rivals[self.base][0],
                "ratio": self.seconds[self.base] / seconds,
                "difference": self.difference,
            })  # fmt: skip
        return rows

    def bars(self, streamed_gbps: float) -> list[dict[str, Any]]:
        """What was asked of our rival, and whether it holds."""
        own = next(row for row in self.rows(streamed_gbps) if row["ours"])
        where = f"{self.name}, {self.state}"
        bars = []
        for bar in self.asked:
            if bar.ratio is not None:
                bars.append(at_least(f"{where}: times {own['base']}", own["ratio"], bar.ratio))
            if bar.share is not None:
                bars.append(at_least(f"{where}: share of the read roof", own["roof_share"], bar.share))
        return bars


def _jobs(sizes: Sizes, nbytes: int) -> Iterator[Job]:
    return chain(
        attention_jobs(sizes.attention, nbytes),
        plain_jobs(sizes.experts, sizes.plain_rows, nbytes),
        quantized_jobs(sizes.experts, sizes.quantized_rows, nbytes),
    )


def _measure(job: Job, roof: Roof, sizes: Sizes) -> Measured:
    give_memory_back()
    roof.sample()
    difference = largest_difference(job)
    seconds = best_seconds(job.rivals, sizes.repeats, sizes.window_s)
    return Measured(
        job.name,
        job.state,
        [(rival.name, rival.nbytes, rival.ours) for rival in job.rivals],
        seconds,
        _base(job, seconds),
        job.bars,
        difference,
        roof.resident(job.memory) if job.memory else None,
    )


def _base(job: Job, seconds: list[float]) -> int:
    """The rival that ratios are taken to: the one named, or the fastest that does the very same job."""
    if job.base is not None:
        return [rival.name for rival in job.rivals].index(job.base)
    allowed = [i for i, rival in enumerate(job.rivals) if not rival.ours and not rival.bound]
    return min(allowed, key=seconds.__getitem__)


def format_kernels(report: dict[str, Any]) -> str:
    """The report as text, for a terminal."""
    machine, roof = report["machine"], report["roof"]
    job = ""
    cells = [["job", "by", "µs", "GB/s", "of the roof", "ratio"]]
    for row in report["rows"]:
        title = f"{row['job']}, {row['state']}"
        cells.append([
            title if title != job else "",
            row["name"],
            f"{row['seconds'] * 1e6:.1f}",
            f"{row['gbps']:.1f}",
            f"{row['roof_share']:.0%}",
            f"{row['ratio']:.2f}",
        ])  # fmt: skip
        job = title
    lines = format_columns(cells, left=2)
    head = (
        f"kernels ({machine['kernels']}) on {machine['cpu']}, threads: {machine['threads']}; "
        f"memory reads {roof['streamed_gbps']:.1f} GB/s over {roof['streamed_bytes'] >> 20} MiB, "
        f"last-level cache {roof['last_level_cache_bytes'] / 2**20:.0f} MiB; best of {report['repeats']}"
    )
    return "\n".join([head, "", *lines, "", *format_bars(report["bars"]), *format_neighbours(machine)])
