"""A short run of the engine with one setting, and what is kept of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from engine.bench.prompts import many_prompts
from engine.config import KnobBlock
from engine.engine import Engine
from engine.tune.rounds import MeasuredRound, RoundWatch
from engine.tune.setting import Setting

#: Rounds at a run's beginning that fill the cache and are not counted, and those that a figure needs at least.
WARM_UP, LEAST = 2, 3


@dataclass(frozen=True)
class Probe:
    """What one setting did, a round: seconds of each operator (`pass_`: of one draft pass), of waiting, and of all.

    Experts a layer: `wanted` distinct, `asked` fetched on demand, `foreseen` fetched ahead; `load`: seconds of the
    link for one. `tokens`: of all sequences. `lengths`: (verified, accepted) of each sequence and round.
    """

    setting: Setting
    rounds: int
    seconds: float
    pass_: float
    shared: float
    experts: float
    head: float
    overhead: float
    stall: float
    load: float
    wanted: float
    asked: float
    foreseen: float
    tokens: float
    lengths: tuple[tuple[int, int], ...]

    @property
    def rate(self) -> float:
        """Tokens/s of the whole batch."""
        return self.tokens / self.seconds


def run_probe(engine: Engine, setting: Setting, seconds: float, rounds: int, max_new_tokens: int) -> Probe | None:
    """Run until `rounds` full rounds are measured, or LEAST of them and `seconds` are over.

    `engine` was loaded with the setting's draft and cache. None when no round was full: the texts are over too soon,
    or the engine switched the draft off because it is never right.
    """
    stop = threading.Event()
    watch = _TimedWatch(engine.loaded.source.table.shape.nbytes, stop, setting, seconds, rounds)
    options = setting.generation(max_new_tokens)
    knobs = KnobBlock(**{**engine.knobs(options).values, "prefetch": setting.prefetch})
    # As many again wait for those that end: the batch stays full.
    engine.generate(many_prompts(2 * setting.batch + 2), options, knobs=knobs, emit=watch.hear, stop=stop)
    full = watch.full
    if not full:
        return None
    return summarize(setting, full, watch.load_seconds, engine.loaded.source.table.layers)


class _TimedWatch(RoundWatch):
    def __init__(self, expert_bytes: int, stop: threading.Event, setting: Setting, seconds: float, rounds: int) -> None:
        super().__init__(expert_bytes, stop)
        self._drafted = (setting.k,) * setting.batch
        self._until, self._most = time.monotonic() + seconds, rounds

    @property
    def full(self) -> list[MeasuredRound]:
        """Those in which every sequence of a whole batch drafts k tokens: at a text's end they are shorter."""
        return [one for one in self.rounds[WARM_UP:] if one.drafted == self._drafted]

    def done(self) -> bool:
        count = len(self.full)
        return count >= self._most or (count >= LEAST and time.monotonic() > self._until)


def summarize(setting: Setting, rounds: Sequence[MeasuredRound], load: float, layers: int) -> Probe:
    """Compute is the median round's: what else runs on the machine hits a few. What is fetched and waited for is the
    mean, and so is the whole."""

    def usual(name: str) -> float:
        return median(getattr(one, name) for one in rounds)

    def average(name: str) -> float:
        return mean(getattr(one, name) for one in rounds)

    return Probe(
        setting=setting,
        rounds=len(rounds),
        seconds=average("seconds"),
        pass_=usual("draft") / setting.k if setting.k else 0.0,
        shared=usual("shared"),
        experts=usual("experts"),
        head=usual("head"),
        overhead=usual("overhead"),
        stall=average("stall"),
        load=load,
        wanted=average("wanted") / layers,
        asked=average("asked") / layers,
        foreseen=average("foreseen") / layers,
        tokens=average("tokens"),
        lengths=tuple(pair for one in rounds for pair in one.lengths),
    )
