"""Comparisons at equal memory, both sides in one run: `python -m engine bench`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.bench.kernels_decode import format_kernels_decode, kernels_decode
from engine.bench.prompts import PROMPTS
from engine.bench.random_model import RANDOM_MODEL, random_model
from engine.bench.table import at_most, format_bars, format_columns, format_neighbours
from engine.config import K_LIMIT, CacheBudget, EngineConfig, GenerationConfig, LinkConfig
from engine.engine import Engine
from engine.kernels.native import Native, native
from engine.machine import Neighbours
from engine.offload.emulated import EmulatedLink
from engine.report import link_info, machine_info

BASE = "on-demand LRU, no speculation"
#: The tables of the decode suite.
TABLES = ("memory", "kernels")


@dataclass(frozen=True)
class Contender:
    """One side of the comparison. `equal_memory` is false for a bound that no memory limit is put on."""

    name: str
    config: EngineConfig
    k: int | str
    equal_memory: bool = True


def decode_suite(
    config: EngineConfig,
    max_new_tokens: int,
    repeats: int,
    say: Callable[[str], None],
    tables: Sequence[str] = TABLES,
) -> dict[str, Any]:
    """What speculation and prefetching bring to decoding at batch 1 and temperature 0, and what the kernels add.

    The two `tables` are `rows` ("memory": offloaded, at equal memory) and `kernel_rows` ("kernels": all resident).
    One that was not asked for is empty. The model RANDOM_MODEL is written on its first use.
    """
    if config.model == RANDOM_MODEL:
        config = dataclasses.replace(config, model=str(random_model(say)))
    neighbours = Neighbours()
    link: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    kernel_rows: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    if "memory" in tables:
        link, rows, bars = _equal_memory(config, max_new_tokens, repeats, say)
    if "kernels" in tables:
        kernel_rows, more = kernels_decode(config, max_new_tokens, repeats, say)
        bars += more
    return {
        "suite": "decode",
        "machine": machine_info() | {"threads": _threads(), "others_cpu_share": neighbours.share()},
        "model": config.model,
        "dtype": config.dtype,
        "link": link,
        "prompts": len(PROMPTS),
        "repeats": repeats,
        "rows": rows,
        "kernel_rows": kernel_rows,
        "bars": bars,
    }


def _threads() -> int:
    """Threads that computed: the kernels leave one to torch."""
    kernels = native()
    return max(torch.get_num_threads(), kernels.threads if isinstance(kernels, Native) else 1)


def _equal_memory(
    config: EngineConfig, max_new_tokens: int, repeats: int, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """(link, rows, bars). All contenders get the same total of fast memory: the baseline spends the draft's bytes on
    more slots, rounded up in its favour. They run in turn, `repeats` times, with one pace of the link.
    """
    options = GenerationConfig(max_new_tokens=max_new_tokens)
    config, link, contenders = _contenders(config)
    results: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders:
            say(f"run {repeat + 1} of {repeats}: {contender.name}")
            results[contender.name] += _measure(contender, options)
    base = _row(contenders[0], results[BASE], None)
    rows = [_row(contender, results[contender.name], base) for contender in contenders]
    return link, rows, _bars(contenders, results, rows)


def _contenders(config: EngineConfig) -> tuple[EngineConfig, dict[str, Any], list[Contender]]:
    """The four contenders, with a preset's pace measured once so that all run over the same link."""
    probe = Engine.load(config)
    try:
        link = link_info(probe)
        if isinstance(probe.loaded.link, EmulatedLink):
            pace = LinkConfig("emulated", gbps=probe.loaded.link.gbps, latency_us=probe.loaded.link.latency_us)
            config = dataclasses.replace(config, link=pace)
        slots = probe.cache.slots_per_layer
        experts = probe.loaded.source.table.experts
        slot_bytes = probe.cache.capacity_nbytes / slots
        draft_bytes = probe.draft_experts.nbytes if probe.draft_experts else 0
        more = min(slots + math.ceil(draft_bytes / slot_bytes), experts)
    finally:
        probe.close()

    def variant(draft: str, policy: str, prefetch: str, count: int) -> EngineConfig:
        return dataclasses.replace(
            config, draft=draft, policy=policy, prefetch=prefetch, cache=CacheBudget(slots=count)
        )

    return config, link, [
        Contender(BASE, variant("none", "lru", "none", more), 0),
        Contender("speculation, no prefetch", variant(config.draft, config.policy, "none", slots), "auto"),
        Contender("speculation and prefetch", variant(config.draft, config.policy, "draft", slots), "auto"),
        Contender("all experts resident", variant("none", "lru", "none", experts), 0, equal_memory=False),
    ]  # fmt: skip


def _measure(contender: Contender, options: GenerationConfig) -> list[dict[str, Any]]:
    """One pass over all prompts; the first prompt warms the cache and the estimators up and is run again."""
    engine = Engine.load(contender.config)
    options = dataclasses.replace(options, k=contender.k, k_max=K_LIMIT)
    try:
        engine.generate([PROMPTS[0]], options)
        return [engine.generate([prompt], options)[0] for prompt in PROMPTS]
    finally:
        engine.close()


def _row(contender: Contender, results: list[dict[str, Any]], base: dict[str, Any] | None) -> dict[str, Any]:
    """One contender's figures over all its prompts and repeats: sums first, then ratios."""

    def total(group: str, name: str) -> float:
        return sum(result[group][name] for result in results)

    tokens = sum(result["new_tokens"] for result in results)
    seconds = sum(result["decode_s"] for result in results)
    requests = total("experts", "requests")
    transfer_s = total("time", "transfer_s")
    drafting = [result for result in results if result["mean_acceptance_length"] is not None]
    rate = tokens / seconds
    return {
        "name": contender.name,
        "equal_memory": contender.equal_memory,
        "ratio": rate / base["tokens_per_s"] if base else 1.0,
        "tokens_per_s": rate,
        "tokens_per_round": tokens / sum(result["rounds"] for result in results),
        "mean_acceptance_length": (
            sum(result["mean_acceptance_length"] for result in drafting) / len(drafting) if drafting else None
        ),
        "hit_rate": total("experts", "hits") / requests,
        "late_rate": total("experts", "late") / requests,
        "miss_rate": total("experts", "misses") / requests,
        "bytes_per_token": total("experts", "bytes_loaded") / tokens,
        "overlap": total("time", "overlapped_s") / transfer_s if transfer_s else None,
        "stall_share": total("time", "stall_s") / seconds,
        "draft_share": total("time", "draft_s") / seconds,
        "memory_total": max(result["memory"]["total"] for result in results),
        "slots_per_layer": results[0]["config"]["slots"],
    }


def _bars(contenders: list[Contender], results: dict[str, list[dict[str, Any]]], rows: list[dict[str, Any]]) -> list:
    """What must hold for the comparison to be fair, as `name, value, bar, holds`."""
    texts = {tuple(tuple(result["token_ids"]) for result in runs) for runs in results.values()}
    equal = [row["memory_total"] for row, contender in zip(rows, contenders, strict=True) if contender.equal_memory]
    return [
        at_most("different outputs at temperature 0", len(texts) - 1, 0),
        at_most("memory of speculation over the baseline's", max(equal[1:]) / equal[0], 1.0),
    ]


def format_decode(report: dict[str, Any]) -> str:
    """A report as text, for a terminal or a README."""
    machine = report["machine"]
    lines = [f"decode on {machine['cpu']}, threads: {machine['threads']}, {report['dtype']}"]
    if report["rows"]:
        lines += [f"link: {report['link']['label']}", "", *_format_rows(report["rows"])]
    if report["kernel_rows"]:
        lines += ["", *format_kernels_decode(report["kernel_rows"])]
    return "\n".join([*lines, "", *format_bars(report["bars"]), *format_neighbours(machine)])


def _format_rows(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "contender": lambda row: row["name"],
        "slots": lambda row: str(row["slots_per_layer"]),
        "memory MiB": lambda row: f"{row['memory_total'] / 2**20:.1f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:.2f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
        "tokens/round": lambda row: f"{row['tokens_per_round']:.2f}",
        "hit": lambda row: f"{row['hit_rate']:.0%}",
        "late": lambda row: f"{row['late_rate']:.0%}",
        "KB/token": lambda row: f"{row['bytes_per_token'] / 1e3:.0f}",
        "overlap": lambda row: "–" if row["overlap"] is None else f"{row['overlap']:.0%}",
        "stall": lambda row: f"{row['stall_share']:.0%}",
    }
    return format_columns([list(columns), *([show(row) for show in columns.values()] for row in rows)])
