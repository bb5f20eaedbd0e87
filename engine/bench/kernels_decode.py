"""What each compiled kernel adds to decoding, end to end, with everything resident: compute alone is measured."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.bench.prompts import PROMPTS
from engine.bench.table import at_least, at_most, format_columns
from engine.bench.transformers_decode import Outcome, run_transformers
from engine.config import CacheBudget, EngineConfig, GenerationConfig, LinkConfig
from engine.engine import Engine
from engine.kernels.native import Native, native

TRANSFORMERS = "transformers generate"
#: In this order they are switched on, one after the other.
ORDER = ("experts", "linear", "attention", "draft")
SPECULATION_K = 4
#: From this size on, decoding is work and not overhead, and the bar counts.
LARGE_MODEL_BYTES = 10**9
#: All experts of a model; a budget in slots is cut to those there are.
EVERYTHING = CacheBudget(share=1.0)


@dataclass(frozen=True)
class Setting:
    """One contender: `k` 0 is plain decoding. `kernels` are those of KERNELS in use."""

    name: str
    k: int
    kernels: tuple[str, ...]


def kernels_decode(
    config: EngineConfig, max_new_tokens: int, repeats: int, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, bars) of plain decoding and speculation with k = 4, kernels switched on one after the other.

    The base is transformers' own `generate` with the same dtype, threads and prompts. Engines are loaded anew for
    each setting and repeat, in turn, and warmed up with all prompts.
    """
    outcomes: dict[str, Outcome] = {}
    settings = _settings(config)
    nbytes, threads = 0, 1
    for repeat in range(repeats):
        for setting in settings:
            say(f"kernels, run {repeat + 1} of {repeats}: {setting.name}")
            nbytes, threads = _run_engine(config, setting, max_new_tokens, outcomes.setdefault(setting.name, Outcome()))
        say(f"kernels, run {repeat + 1} of {repeats}: {TRANSFORMERS}")
        torch.set_num_threads(threads)
        run_transformers(config, max_new_tokens, outcomes.setdefault(TRANSFORMERS, Outcome()))
    rows = _rows(settings, outcomes)
    return rows, _bars(settings, outcomes, rows, nbytes)


def _settings(config: EngineConfig) -> list[Setting]:
    """Without a compiler, or without names in `config.kernels`, torch alone remains."""
    names = [name for name in ORDER if name in config.kernels and isinstance(native(), Native)]
    settings = []
    for k, title in ((0, "plain"), (SPECULATION_K, f"speculation, k = {SPECULATION_K}")):
        used = [name for name in names if k or name != "draft"]
        settings.append(Setting(f"{title}, torch", k, ()))
        settings += [Setting(f"{title}, + {used[n - 1]}", k, tuple(used[:n])) for n in range(1, len(used) + 1)]
    return settings


def _run_engine(config: EngineConfig, setting: Setting, max_new_tokens: int, outcome: Outcome) -> tuple[int, int]:
    """Add one pass over all prompts; returns the bytes of the model's weights, and the threads that computed."""
    engine = Engine.load(
        dataclasses.replace(
            config,
            kernels=setting.kernels,
            draft="self-int4" if setting.k else "none",
            policy="lru",
            prefetch="none",
            cache=EVERYTHING,
            link=LinkConfig("disk"),
        )
    )
    options = GenerationConfig(max_new_tokens=max_new_tokens, k=setting.k)
    try:
        engine.generate(list(PROMPTS), options)
        for prompt in PROMPTS:
            result = engine.generate([prompt], options)[0]
            outcome.tokens += result["new_tokens"]
            outcome.seconds += result["decode_s"]
            outcome.rounds += result["rounds"]
            outcome.ids[prompt] = result["token_ids"]
        memory = result["memory"]
        return memory["shared"] + memory["cache"], engine.loaded.threads
    finally:
        engine.close()
        del engine
        gc.collect()


def _rows(settings: list[Setting], outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """transformers first. `ratio` is to transformers, `over_torch` to the same decoding without any kernel."""
    base = outcomes[TRANSFORMERS]
    first = {"name": TRANSFORMERS, "kernels": None, "k": 0, "tokens_per_s": base.rate, "ratio": 1.0}
    rows: list[dict[str, Any]] = [{**first, "over_torch": None, "tokens_per_round": None}]
    torch_rates: dict[int, float | None] = {}
    for setting in settings:
        outcome = outcomes[setting.name]
        torch_rate = torch_rates.setdefault(setting.k, outcome.rate)
        rows.append({
            "name": setting.name,
            "kernels": list(setting.kernels),
            "k": setting.k,
            "tokens_per_s": outcome.rate,
            "ratio": _over(outcome.rate, base.rate),
            "over_torch": _over(outcome.rate, torch_rate),
            "tokens_per_round": outcome.tokens / outcome.rounds,
        })  # fmt: skip
    return rows


def _over(rate: float | None, base: float | None) -> float | None:
    return rate / base if rate and base else None


def _bars(
    settings: list[Setting], outcomes: dict[str, Outcome], rows: list[dict[str, Any]], model_bytes: int
) -> list[dict[str, Any]]:
    """Both need the target's kernels; the first a model with something to compute, too."""
    on = [setting for setting in settings if set(ORDER) - {"draft"} <= set(setting.kernels)]
    if not on:
        return []
    texts = [outcomes[setting.name].ids for setting in on]
    different = sum(len({tuple(ids[prompt]) for ids in texts}) > 1 for prompt in PROMPTS)
    bars = [at_most("different outputs between k, kernels on", different, 0)]
    ratio = next(row["ratio"] for row in rows if row["name"] == on[0].name)
    if model_bytes >= LARGE_MODEL_BYTES and ratio is not None:
        bars.append(at_least("plain decoding, all resident: times transformers", ratio, 2.0))
    return bars


def format_kernels_decode(rows: list[dict[str, Any]]) -> list[str]:
    """The table's lines."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    cells = [["what the kernels add", "tokens/s", "× transformers", "× torch", "tokens/round"]]
    figures = ("tokens_per_s", "ratio", "over_torch", "tokens_per_round")
    cells += [[row["name"], *(number(row[figure]) for figure in figures)] for row in rows]
    return format_columns(cells)
