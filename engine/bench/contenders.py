"""Sides of a comparison of engines: what each runs with, what it did, and the table of them."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from engine.bench.prompts import PROMPTS
from engine.bench.table import format_columns
from engine.config import K_LIMIT, EngineConfig, GenerationConfig, KnobBlock, LinkConfig
from engine.engine import Engine
from engine.offload.emulated import EmulatedLink
from engine.report import link_info


@dataclass(frozen=True)
class Contender:
    """One side of a comparison. `equal_memory` is false for a bound that no memory limit is put on.

    `around` changes a loaded engine in a way that no user needs, for as long as the contender runs.
    """

    name: str
    config: EngineConfig
    k: int | str
    equal_memory: bool = True
    around: Callable[[Engine], AbstractContextManager[Any]] = nullcontext

    @property
    def load(self) -> EngineConfig:
        """What must be loaded; the rest are live knobs."""
        return dataclasses.replace(self.config, prefetch="draft", policy="lookahead")


def pinned_link(engine: Engine) -> EngineConfig:
    """The engine's configuration with a preset's pace as it was measured, so that all contenders get the same link."""
    link = engine.loaded.link
    if not isinstance(link, EmulatedLink):
        return engine.config
    return dataclasses.replace(engine.config, link=LinkConfig("emulated", gbps=link.gbps, latency_us=link.latency_us))


def same_link(config: EngineConfig) -> tuple[EngineConfig, dict[str, Any]]:
    """(the configuration with one pace for all, the link in words)."""
    engine = Engine.load(dataclasses.replace(config, draft="none"))
    try:
        return pinned_link(engine), link_info(engine)
    finally:
        engine.close()


def measure(contender: Contender, options: GenerationConfig) -> list[dict[str, Any]]:
    """One pass over all prompts; the first prompt warms the cache and the estimators up and is run again."""
    engine = Engine.load(contender.config)
    try:
        return measure_loaded(engine, contender, options)
    finally:
        engine.close()


def measure_loaded(engine: Engine, contender: Contender, options: GenerationConfig) -> list[dict[str, Any]]:
    """The same with an engine that was loaded with `contender.load`, or with its configuration."""
    options = dataclasses.replace(options, k=contender.k, k_max=K_LIMIT)
    live = {"prefetch": contender.config.prefetch, "policy": contender.config.policy}

    def run(prompt: str) -> dict[str, Any]:
        knobs = KnobBlock(**{**engine.knobs(options).values, **live})
        return engine.generate([prompt], options, knobs=knobs)[0]

    with contender.around(engine):
        engine.cache.reset()
        run(PROMPTS[0])
        return [run(prompt) for prompt in PROMPTS]


def measure_all(
    contenders: list[Contender], options: GenerationConfig, repeats: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Everybody's results, by name. Contenders in turn that differ in live knobs only share one engine."""
    results: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for config, group in itertools.groupby(contenders, key=lambda contender: contender.load):
            engine = Engine.load(config)
            try:
                for contender in group:
                    say(f"run {repeat + 1} of {repeats}: {contender.name}")
                    results[contender.name] += measure_loaded(engine, contender, options)
            finally:
                engine.close()
                del engine
                gc.collect()
    return results


def contender_row(contender: Contender, results: list[dict[str, Any]], base: dict[str, Any] | None) -> dict[str, Any]:
    """One contender's figures over all its prompts and repeats: sums first, then ratios."""

    def total(group: str, name: str) -> float:
        return sum(result[group][name] for result in results)

    tokens = sum(result["new_tokens"] for result in results)
    seconds = sum(result["decode_s"] for result in results)
    requests = total("experts", "requests")
    loaded = total("experts", "bytes_loaded")
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
        "bytes_per_token": loaded / tokens,
        "wasted_share": total("experts", "bytes_wasted") / loaded if loaded else 0.0,
        "overlap": total("time", "overlapped_s") / transfer_s if transfer_s else None,
        "stall_share": total("time", "stall_s") / seconds,
        "draft_share": total("time", "draft_s") / seconds,
        "memory_total": max(result["memory"]["total"] for result in results),
        "slots_per_layer": results[0]["config"]["slots"],
    }


def _shown(name: str, form: str, scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
    """Shows one figure of a row, or a dash."""
    return lambda row: "–" if row[name] is None else format(row[name] / scale, form)


#: Columns of the table: heads, and how each row shows.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "contender": lambda row: row["name"],
    "slots": _shown("slots_per_layer", ".3g"),
    "memory MiB": _shown("memory_total", ".1f", 2**20),
    "tokens/s": _shown("tokens_per_s", ".2f"),
    "ratio": _shown("ratio", ".2f"),
    "tokens/round": _shown("tokens_per_round", ".2f"),
    "hit": _shown("hit_rate", ".0%"),
    "late": _shown("late_rate", ".0%"),
    "KB/token": _shown("bytes_per_token", ".0f", 1e3),
    "wasted": _shown("wasted_share", ".0%"),
    "overlap": _shown("overlap", ".0%"),
    "stall": _shown("stall_share", ".0%"),
}


def format_rows(rows: list[dict[str, Any]]) -> list[str]:
    """The table's lines."""
    return format_columns([list(COLUMNS), *([show(row) for show in COLUMNS.values()] for row in rows)])
