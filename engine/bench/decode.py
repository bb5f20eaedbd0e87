"""Comparisons at equal memory, both sides in one run: `python -m engine bench`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.bench.contenders import Contender, contender_row, format_rows, measure, pinned_link
from engine.bench.kernels_decode import format_kernels_decode, kernels_decode
from engine.bench.prompts import PROMPTS
from engine.bench.random_model import with_random_model
from engine.bench.table import at_most, format_bars, format_neighbours
from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.kernels.native import Native, native
from engine.machine import Neighbours
from engine.report import link_info, machine_info

BASE = "on-demand LRU, no speculation"
#: The tables of the decode suite.
TABLES = ("memory", "kernels")


def decode_suite(
    config: EngineConfig,
    max_new_tokens: int,
    repeats: int,
    say: Callable[[str], None],
    tables: Sequence[str] = TABLES,
) -> dict[str, Any]:
    """What speculation and prefetching bring to decoding at batch 1 and temperature 0, and what the kernels add.

    The two `tables` are `rows` ("memory": offloaded, at equal memory) and `kernel_rows` ("kernels": all resident).
    One that was not asked for is empty. The random model is written on its first use.
    """
    config = with_random_model(config, say)
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
            results[contender.name] += measure(contender, options)
    base = contender_row(contenders[0], results[BASE], None)
    rows = [contender_row(contender, results[contender.name], base) for contender in contenders]
    return link, rows, _bars(contenders, results, rows)


def _contenders(config: EngineConfig) -> tuple[EngineConfig, dict[str, Any], list[Contender]]:
    """The four contenders, with a preset's pace measured once so that all run over the same link."""
    probe = Engine.load(config)
    try:
        link = link_info(probe)
        config = pinned_link(probe)
        slots = probe.cache.slots_per_layer
        experts = probe.loaded.source.table.experts
        slot_bytes = probe.cache.capacity_nbytes / slots
        draft_bytes = probe.draft_nbytes
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
        lines += [f"link: {report['link']['label']}", "", *format_rows(report["rows"])]
    if report["kernel_rows"]:
        lines += ["", *format_kernels_decode(report["kernel_rows"])]
    return "\n".join([*lines, "", *format_bars(report["bars"]), *format_neighbours(machine)])
