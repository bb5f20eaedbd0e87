"""Profile, search, play: the whole of `tune`."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engine.bench.contenders import pinned_link
from engine.config import K_LIMIT, CacheBudget, EngineConfig, LinkConfig
from engine.engine import Engine
from engine.errors import UsageError
from engine.report import link_info, machine_info, model_info
from engine.tune.family import Shape
from engine.tune.memory import MemoryLimit
from engine.tune.prediction import Prediction, Predictor
from engine.tune.probe import Probe, run_probe
from engine.tune.search import finalists, search
from engine.tune.setting import Setting
from engine.tune.space import Fixed, probes, settings

Say = Callable[[str], None]

#: How many of the best predicted settings are played, and rounds of a profiling run and of a played one at most.
FINALISTS, PROBE_ROUNDS, PLAYED_ROUNDS = 3, 40, 80
#: Tokens of a sequence in a measurement: prompt (up to 16) and new ones.
PROMPT_TOKENS, NEW_TOKENS = 16, 96
#: Of the seconds that are allowed, the share for profiling; loading models takes about half of it.
PROFILING = 0.75


@dataclass(frozen=True)
class Ground:
    """What all measurements share."""

    config: EngineConfig
    memory: MemoryLimit
    shape: Shape
    about: dict[str, Any]
    memory_gbps: float


def open_ground(config: EngineConfig, budget: CacheBudget, tokens: int = PROMPT_TOKENS + NEW_TOKENS) -> Ground:
    """Load the model once: to pin an emulated link's pace, and to learn what a sequence's keys and values take."""
    engine = Engine.load(dataclasses.replace(config, draft="none"))
    try:
        pinned = dataclasses.replace(pinned_link(engine), draft=config.draft)
        table = engine.loaded.source.table
        lane = "disk" if config.link.kind == "disk" else "link"
        shape = Shape(table.layers, table.experts, engine.top_k, lane)
        kv, memory_gbps = engine.kv_bytes_per_token, engine.roofs["memory_gbps"]
        about = {"machine": machine_info(), "model": model_info(engine), "link": link_info(engine)}
    finally:
        engine.close()
        del engine
        gc.collect()
    memory = MemoryLimit(pinned, budget, kv, tokens + K_LIMIT + 2)
    return Ground(pinned, memory, shape, about, memory_gbps)


def measure(
    ground: Ground, chosen: Iterable[Setting], seconds: float, rounds: int, say: Say, until: float = math.inf
) -> list[Probe]:
    """Run each setting, but for those of a draft and cache whose turn comes after `until` (monotonic seconds).

    Those of one draft and cache in turn share one engine.
    """
    done: list[Probe] = []
    for (_, _), group in itertools.groupby(chosen, key=lambda setting: (setting.draft, setting.slots)):
        members = list(group)
        if done and time.monotonic() > until:
            say(f"not measured, the time is over: draft {members[0].draft}")
            continue
        engine = Engine.load(members[0].engine(ground.config, ground.memory.stored_bytes))
        try:
            for setting in members:
                probe = run_probe(engine, setting, seconds, rounds, NEW_TOKENS)
                if probe is None:
                    say(f"{setting.name}: left out, its draft is never right")
                    continue
                done.append(probe)
                say(f"{setting.name}: {probe.rate:.1f} tokens/s, a round {probe.seconds * 1e3:.0f} ms")
        finally:
            engine.close()
            del engine
            gc.collect()
    return done


@dataclass(frozen=True)
class Tuned:
    """What `tune` found: predictions, the best first, and the finalists' runs. `link` is the one asked for."""

    ground: Ground
    fixed: Fixed
    link: LinkConfig
    probes: list[Probe]
    predictor: Predictor
    ranked: list[Prediction]
    played: list[tuple[Prediction, Probe]]
    seconds: float

    @property
    def winner(self) -> tuple[Prediction, Probe]:
        """The fastest of the played."""
        return max(self.played, key=lambda pair: pair[1].rate)


def profile(ground: Ground, fixed: Fixed, seconds: float, say: Say) -> list[Probe]:
    """The short runs from which everything is predicted."""
    chosen = probes(fixed, ground.memory)
    say(f"measuring {len(chosen)} settings")
    until = time.monotonic() + seconds * PROFILING
    return measure(ground, chosen, seconds * PROFILING / 2 / len(chosen), PROBE_ROUNDS, say, until)


def tune(config: EngineConfig, fixed: Fixed, budget: CacheBudget, seconds: float, say: Say) -> Tuned:
    """Raises BudgetError when nothing fits, UsageError, and what loading a model raises."""
    start = time.monotonic()
    ground = open_ground(config, budget)
    measured = profile(ground, fixed, seconds, say)
    predictor = Predictor(ground.shape, measured)
    ranked = search(settings(fixed, ground.memory), predictor, predictor.knows)
    best = finalists(ranked, FINALISTS)
    say(f"playing the best {len(best)} of {len(ranked)} predicted settings")
    order = sorted(best, key=lambda p: (p.setting.draft, p.setting.slots))
    played = measure(ground, [p.setting for p in order], seconds * (1 - PROFILING) / len(best), PLAYED_ROUNDS, say)
    by_setting = {prediction.setting: prediction for prediction in best}
    pairs = [(by_setting[probe.setting], probe) for probe in played]
    if not pairs:
        raise UsageError("no draft of these is ever right on the sample texts: leave --draft and --k to auto")
    return Tuned(ground, fixed, config.link, measured, predictor, ranked, pairs, time.monotonic() - start)
