"""The governor against every fixed setting: `python -m engine bench --suite governor`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

from engine import events
from engine.bench.prompts import PROMPTS
from engine.bench.random_model import with_random_model
from engine.bench.table import at_least, at_most, format_bars, format_columns, format_neighbours
from engine.config import EMBEDDED_MODEL, K_LIMIT, CacheBudget, EngineConfig, GenerationConfig, KnobBlock, LinkConfig
from engine.control.governor import Governor
from engine.engine import Engine
from engine.errors import UsageError
from engine.machine import Neighbours
from engine.report import machine_info

LINKS_GBPS, LARGE_LINKS_GBPS = (0.1, 1.0, 10.0), (2.0, 10.0)
CACHES, LARGE_CACHES = (0.25, 0.5), (0.5,)
TEMPERATURES = (0.0, 0.8)
DRAFT_LENGTHS = (1, 2, 4, 8, 16)
#: Prompts that the sweep runs; the final runs all.
SWEEP_PROMPTS = 2
#: The fixed settings that go from the sweep to the final, besides plain decoding.
FINALISTS = 3
#: The issue's bars.
BEST_RATIO, PLAIN_RATIO, PREDICTION_ERROR = 0.95, 0.97, 0.15


@dataclass(frozen=True)
class Workload:
    """A model behind a link of `gbps` GB/s with a share `cache` of its experts resident, sampled at `temperature`."""

    model: str
    gbps: float
    cache: float
    temperature: float

    @property
    def name(self) -> str:
        model = os.path.basename(os.path.normpath(self.model))
        return f"{model}, {self.gbps:g} GB/s, {self.cache:.0%}, T {self.temperature:g}"


@dataclass
class Contender:
    """A setting of the knobs k and prefetch, with what its runs brought; its governor was taught by nobody else."""

    k: int | str
    prefetch: str
    governor: Governor
    rates: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        if self.k == "auto":
            return "auto"
        return f"k = {self.k}" + (", prefetch" if self.prefetch == "draft" else "")

    def forget(self) -> None:
        """Start to count anew; the governor keeps what it learned."""
        self.rates, self.errors, self.tokens, self.seconds = [], [], 0, 0.0


def workloads(model: str) -> list[Workload]:
    """The embedded model's, and those of `model` where it is another, larger one."""
    sets: list[tuple[str, tuple[float, ...], tuple[float, ...]]] = [(str(EMBEDDED_MODEL), LINKS_GBPS, CACHES)]
    if model != str(EMBEDDED_MODEL):
        sets.append((model, LARGE_LINKS_GBPS, LARGE_CACHES))
    return [
        Workload(name, gbps, cache, temperature)
        for name, links, caches in sets
        for cache in caches
        for gbps in links
        for temperature in TEMPERATURES
    ]


def governor_suite(
    config: EngineConfig, max_new_tokens: int, repeats: int, say: Callable[[str], None], only: str = ""
) -> dict[str, Any]:
    """The governor against the best of all fixed settings, on every workload whose name contains `only`.

    A sweep runs all contenders once over some prompts; the best of it, plain decoding and the governor then run
    all prompts `repeats` times. They take turns run by run, with the same memory: one engine, whose cache is
    emptied before each run. Raises UsageError when no workload is left.
    """
    model = with_random_model(config, say).model
    chosen = [workload for workload in workloads(model) if only in workload.name]
    if not chosen:
        names = "; ".join(workload.name for workload in workloads(model))
        raise UsageError(f"no workload has {only!r} in its name: {names}")
    neighbours = Neighbours()
    rows = []
    for (name, cache), group in groupby(chosen, key=lambda workload: (workload.model, workload.cache)):
        link = LinkConfig("emulated", gbps=LINKS_GBPS[-1])
        loaded = dataclasses.replace(config, model=name, cache=CacheBudget(share=cache), link=link)
        engine = Engine.load(loaded)
        try:
            for workload in group:
                rows.append(_row(engine, workload, max_new_tokens, repeats))
                say(_progress(rows[-1]))
        finally:
            engine.close()
    return {
        "suite": "governor",
        "machine": machine_info() | {"others_cpu_share": neighbours.share()},
        "dtype": config.dtype,
        "prompts": len(PROMPTS),
        "repeats": repeats,
        "rows": rows,
        "bars": _bars(rows),
    }


def _row(engine: Engine, workload: Workload, max_new_tokens: int, repeats: int) -> dict[str, Any]:
    """Measure one workload. All ratios are medians over pairs of runs of the same prompt, one after the other."""

    def contender(k: int | str, prefetch: str) -> Contender:
        return Contender(k, prefetch, engine.new_governor())

    plain, auto = contender(0, "none"), contender("auto", "auto")
    fixed = [plain, *(contender(k, prefetch) for k in DRAFT_LENGTHS for prefetch in ("none", "draft"))]
    _take_turns(engine, workload, [auto, *fixed], max_new_tokens, range(SWEEP_PROMPTS))
    sweep = {one.name: one.tokens / one.seconds for one in fixed}
    cold = auto.tokens / auto.seconds / max(sweep.values())
    finalists = sorted(fixed, key=lambda one: sweep[one.name])[-FINALISTS:]
    final = [auto, *finalists, *([plain] if plain not in finalists else [])]
    for one in final:
        one.forget()
    memory = _take_turns(engine, workload, final, max_new_tokens, range(repeats * len(PROMPTS)))
    best = max((one for one in final if one is not auto), key=lambda one: median(one.rates))
    return {
        "name": workload.name,
        **dataclasses.asdict(workload),
        "best": best.name,
        "best_tokens_per_s": median(best.rates),
        "plain_tokens_per_s": median(plain.rates),
        "auto_tokens_per_s": median(auto.rates),
        "ratio": _paired(auto, best),
        "ratio_to_plain": _paired(auto, plain),
        "cold_ratio": cold,
        "prediction_error": median(auto.errors),
        "memory_total": memory,
        "sweep": sweep,
    }


def _paired(one: Contender, other: Contender) -> float:
    return median(a / b for a, b in zip(one.rates, other.rates, strict=True))


def _take_turns(engine: Engine, workload: Workload, contenders: list[Contender], max_new_tokens: int,
                turns: range) -> int:  # fmt: skip
    """Every contender runs once a turn, each turn in another order; returns the bytes of fast memory that all had."""
    memory = 0
    for turn in turns:
        start = turn % len(contenders)
        for one in contenders[start:] + contenders[:start]:
            options = GenerationConfig(
                max_new_tokens=max_new_tokens, temperature=workload.temperature, seed=turn, k=one.k, k_max=K_LIMIT
            )
            engine.governor = one.governor
            engine.cache.reset()
            knobs = KnobBlock(**engine.knobs(options).values | {"prefetch": one.prefetch, "link_gbps": workload.gbps})
            heard: list[events.Event] = []
            result = engine.generate([PROMPTS[turn % len(PROMPTS)]], options, knobs=knobs, emit=heard.append)[0]
            one.rates.append(result["decode_tok_s"])
            one.tokens += result["new_tokens"]
            one.seconds += result["decode_s"]
            one.errors += _prediction_errors(heard)
            memory = max(memory, result["memory"]["total"])
    return memory


def _prediction_errors(heard: list[events.Event]) -> Iterator[float]:
    """|predicted / measured - 1| of each round, for the k that was drafted (at a text's end less than was chosen)."""
    choices = {event.round: event for event in heard if isinstance(event, events.GovernorChoice)}
    for point in heard:
        if isinstance(point, events.RooflinePoint):
            predicted = choices[point.round].predicted_seconds[point.k]
            if predicted:  # nothing is predicted before the first round
                yield abs(predicted / point.seconds - 1)


def _bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        bar
        for row in rows
        for bar in (
            at_least(f"{row['name']}: auto over the best fixed setting", row["ratio"], BEST_RATIO),
            at_least(f"{row['name']}: auto over k = 0", row["ratio_to_plain"], PLAIN_RATIO),
            at_most(f"{row['name']}: median error of predicted cycles", row["prediction_error"], PREDICTION_ERROR),
        )
    ]


def _progress(row: dict[str, Any]) -> str:
    return (
        f"{row['name']}: auto {row['auto_tokens_per_s']:.1f} tokens/s, {row['ratio']:.2f} of {row['best']}, "
        f"{row['ratio_to_plain']:.2f} of k = 0"
    )


def format_governor(report: dict[str, Any]) -> str:
    """A report as text, for a terminal or a README."""
    machine = report["machine"]
    columns = {
        "workload": lambda row: row["name"],
        "best fixed": lambda row: row["best"],
        "tokens/s": lambda row: f"{row['best_tokens_per_s']:.1f}",
        "auto": lambda row: f"{row['auto_tokens_per_s']:.1f}",
        "ratio": lambda row: f"{row['ratio']:.2f}",
        "to k = 0": lambda row: f"{row['ratio_to_plain']:.2f}",
        "first runs": lambda row: f"{row['cold_ratio']:.2f}",
        "error": lambda row: f"{row['prediction_error']:.0%}",
    }
    cells = [list(columns), *([show(row) for show in columns.values()] for row in report["rows"])]
    missed = [bar for bar in report["bars"] if not bar["holds"]]
    return "\n".join(
        [
            f"governor on {machine['cpu']}, {report['dtype']}, emulated links",
            "",
            *format_columns(cells, left=2),
            "",
            f"{len(report['bars']) - len(missed)} of {len(report['bars'])} bars hold",
            *format_bars(missed),
            *format_neighbours(machine),
        ]
    )
