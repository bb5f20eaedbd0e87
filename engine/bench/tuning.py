"""`tune` held to this machine: predictions against runs, and its choice against a sweep (`bench --suite tune`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

from engine.bench.table import at_least, at_most, format_bars, format_columns, format_neighbours
from engine.config import CacheBudget, EngineConfig
from engine.machine import Neighbours
from engine.tune.memory import MemoryLimit
from engine.tune.prediction import Predictor
from engine.tune.probe import Probe
from engine.tune.setting import Setting
from engine.tune.space import Fixed, settings
from engine.tune.tuner import Tuned, measure, tune

Say = Callable[[str], None]

#: Fast memory for draft, cache and KV, as a share of the experts' bytes; that of some settings more, a half of it.
LIMIT, LESS = 0.5, 0.25
#: Draft lengths of the sweep. Profiling runs have others, so that nothing is predicted that was measured before.
SWEPT_K = (3, 5, 10)
#: Rounds of a run at most, and seconds if those are more than a few rounds: of the sweep and of the last comparison.
ROUNDS, FINAL_ROUNDS = 40, 80
RUN_SECONDS, FINAL_SECONDS = 2.0, 4.0
FINAL_REPEATS = 3
#: Nothing is fixed.
ALL = Fixed()
#: The bars: SpecMoEOff's estimator is off by 9.7 % (section 6).
MOST_ERROR, LEAST_SHARE = 0.10, 0.95


def tuning_suite(config: EngineConfig, seconds: float, say: Say, fixed: Fixed = ALL) -> dict[str, Any]:
    """`tune` with LIMIT of the experts' bytes, then every setting of a small grid, which it did not measure.

    The grid's best and the choice run in turn once more, so that neither wins by a lucky minute.
    """
    neighbours = Neighbours()
    tuned = tune(config, fixed, CacheBudget(share=LIMIT), seconds, say)
    grid = _grid(tuned, fixed)
    say(f"sweeping {len(grid)} settings")
    swept = measure(tuned.ground, grid, RUN_SECONDS, ROUNDS, say)
    best = max((probe for probe in swept if probe.setting in set(_full(tuned, grid))), key=lambda probe: probe.rate)
    choice = tuned.winner[1]
    finals = _finals(tuned, choice.setting, best.setting, say)
    rows = [_row(tuned.predictor, probe) for probe in swept]
    errors = [abs(row["error"]) for row in rows]
    share = finals[choice.setting] / max(finals.values())
    return {
        "suite": "tune",
        **tuned.ground.about,
        "machine": tuned.ground.about["machine"] | {"others_cpu_share": neighbours.share()},
        "dtype": config.dtype,
        "limit": LIMIT,
        "tune_s": tuned.seconds,
        "rows": rows,
        "choice": dataclasses.asdict(choice.setting) | {"tokens_per_s": finals[choice.setting]},
        "best": dataclasses.asdict(best.setting) | {"tokens_per_s": finals[best.setting]},
        "bars": [
            at_least("settings predicted and measured", len(rows), 10),
            at_most("median error of the predicted round", median(errors), MOST_ERROR),
            at_least("tune's choice, share of the sweep's best", share, LEAST_SHARE),
        ],
    }


def _grid(tuned: Tuned, fixed: Fixed) -> list[Setting]:
    """Of each draft and prefetch that could be predicted: SWEPT_K at the smallest and largest batch, and less cache."""
    full = [s for s in settings(fixed, tuned.ground.memory) if tuned.predictor.knows(s) and s.k in (0, *SWEPT_K)]
    ends = {min(s.batch for s in full), max(s.batch for s in full)}
    full = [s for s in full if s.batch in ends]
    smaller = _smaller(tuned.ground.memory)
    less = [
        dataclasses.replace(s, slots=smaller.slots(s.draft, s.batch))
        for s in full
        if s.k in (0, SWEPT_K[1]) and s.batch == min(ends) and smaller.fits(s.draft, s.batch)
    ]
    return sorted([*full, *less], key=lambda s: (s.draft, s.slots))


def _smaller(memory: MemoryLimit) -> MemoryLimit:
    return memory.limited(round(LESS * memory.expert_bytes))


def _full(tuned: Tuned, grid: list[Setting]) -> list[Setting]:
    """Those with all the memory that `tune` had."""
    return [s for s in grid if s.slots == tuned.ground.memory.slots(s.draft, s.batch)]


def _finals(tuned: Tuned, choice: Setting, best: Setting, say: Say) -> dict[Setting, float]:
    """Tokens/s of both, over all the rounds of runs in turn."""
    runs: dict[Setting, list[Probe]] = {choice: [], best: []}
    for _, setting in itertools.product(range(FINAL_REPEATS), list(runs)):
        runs[setting] += measure(tuned.ground, [setting], FINAL_SECONDS, FINAL_ROUNDS, say)
    return {
        setting: sum(p.tokens * p.rounds for p in probes) / sum(p.seconds * p.rounds for p in probes)
        for setting, probes in runs.items()
    }


def _row(predictor: Predictor, probe: Probe) -> dict[str, Any]:
    predicted = predictor(probe.setting)
    return {
        **dataclasses.asdict(probe.setting),
        "predicted_s": predicted.seconds,
        "measured_s": probe.seconds,
        "error": predicted.seconds / probe.seconds - 1,
        "predicted_tokens_per_s": predicted.rate,
        "tokens_per_s": probe.rate,
        "tokens_per_round": probe.tokens,
    }


def format_tuning(report: dict[str, Any]) -> str:
    """A report as text, for a terminal or a README."""
    cells = [["draft", "prefetch", "k", "batch", "slots", "round ms", "predicted", "error", "tokens/s", "predicted"]]
    cells += [
        [row["draft"], row["prefetch"], str(row["k"]), str(row["batch"]), str(row["slots"]),
         f"{row['measured_s'] * 1e3:.0f}", f"{row['predicted_s'] * 1e3:.0f}", f"{row['error']:+.0%}",
         f"{row['tokens_per_s']:.1f}", f"{row['predicted_tokens_per_s']:.1f}"]
        for row in report["rows"]
    ]  # fmt: skip

    def told(name: str) -> str:
        one = report[name]
        setting = f"{one['draft']}, k = {one['k']}, batch {one['batch']}, prefetch {one['prefetch']}"
        return f"{setting}: {one['tokens_per_s']:.1f} tokens/s"

    return "\n".join([
        f"tune on {report['model']['name']}, {report['dtype']}, {report['machine']['cpu']}; link: "
        f"{report['link']['label']}; {report['limit']:.0%} of the experts' bytes; {report['tune_s']:.0f} s",
        "",
        *format_columns(cells, left=2),
        "",
        f"tune's choice: {told('choice')}",
        f"the sweep's best: {told('best')}",
        "",
        *format_bars(report["bars"]),
        *format_neighbours(report["machine"]),
    ])  # fmt: skip
