"""T_cycle: how long a round takes, predicted from what the rounds before it took (MoE-SpeQ, equation 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.control.estimators import Ema, LoadEstimator, RunningLine
from engine.control.roofline import CycleCosts, cycle_seconds


class Arm(NamedTuple):
    """What the governor decides for a round: the draft length, and whether the draft's routes start transfers."""

    k: int
    prefetch: bool

    def __str__(self) -> str:
        return f"k = {self.k}" + (" with prefetch" if self.prefetch else "")


@dataclass(frozen=True)
class Memory:
    """The offloaded side: `transfer_seconds` of one expert over the link, `slots` of the cache over all layers."""

    transfer_seconds: float
    slots: int


@dataclass(frozen=True)
class Observation:
    """What one round cost and brought. Times in seconds.

    `draft_seconds` and `verify_seconds` exclude waiting (`stall_seconds`); `seconds` is everything since the round
    before; `lengths` holds (verified, accepted) of each sequence; `tokens` were emitted by all of them.
    `wanted[r-1]` and `misses[r-1]` as LoadEstimator.observe.
    """

    k: int
    prefetch: bool
    draft_passes: int
    draft_seconds: float
    verify_seconds: float
    stall_seconds: float
    seconds: float
    tokens: int
    lengths: list[tuple[int, int]]
    wanted: list[int]
    misses: list[int]

    @property
    def compute_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds

    @property
    def overhead_seconds(self) -> float:
        """All but computing and waiting."""
        return self.seconds - self.compute_seconds - self.stall_seconds


#: Measurements further from what is usual, as logs, count as hiccups of the machine: a factor of 1.35.
HICCUP = 0.3


class Correction:
    """How far measured cycles are from predicted ones, as a smooth function of k.

    Neighbours inform each other: a k that was tried once, in a noisy moment, must not make a spike. But plain
    decoding, drafting, and drafting with prefetch stand apart: what misleads the model of one (a prefetch that
    hides less than it should, say) is absent from the others.
    """

    #: How fast an observation loses weight with the distance in log(k + 1), and how many count at most.
    REACH, MOST = 0.4, 8
    #: Observations that say 1, so that a single one is not believed in full.
    PRIOR = 0.25
    #: How far a measured cycle may correct a predicted one.
    LOW, HIGH = 0.25, 4.0

    def __init__(self, k_limit: int) -> None:
        self._seen = [Ema(reach=HICCUP) for _ in range(k_limit + 1)]
        # Sums over the k that were seen, kept for each k that may be asked: asking is what every round does most.
        self._weights = [0.0] * (k_limit + 1)
        self._values = [0.0] * (k_limit + 1)

    def add(self, k: int, measured_over_predicted: float) -> None:
        ema = self._seen[k]
        old_weight, old_value = min(ema.count, self.MOST), ema.get(0.0)
        ema.add(math.log(min(max(measured_over_predicted, self.LOW), self.HIGH)))
        weight, value = min(ema.count, self.MOST), ema.get(0.0)
        for near in range(1, len(self._seen)) if k else (0,):
            closeness = math.exp(-abs(math.log((near + 1) / (k + 1))) / self.REACH)
            self._weights[near] += (weight - old_weight) * closeness
            self._values[near] += (weight * value - old_weight * old_value) * closeness

    def weight(self, k: int) -> float:
        """How many observations, here and nearby, stand behind the factor."""
        return self._weights[k]

    def __call__(self, k: int) -> float:
        """The factor for predictions at k; 1 before any observation."""
        return math.exp(self._values[k] / (self._weights[k] + self.PRIOR))


class ComputeCosts:
    """Seconds of compute at the machine's usual speed: a draft pass, and a verification of r rows."""

    def __init__(self) -> None:
        self.draft_pass = Ema()
        self.verify = RunningLine()


class Pace:
    """How much slower the processor computes now than usual, from arms compared with themselves.

    Comparing with what a model predicts would take the model's errors for the machine's.
    """

    #: How much of an arm's deviation from itself is believed at once, and how fast its own past follows.
    WEIGHT, REFERENCE_WEIGHT = 0.2, 0.05

    def __init__(self) -> None:
        self._log = 0.0
        self._references: dict[Arm, Ema] = {}

    def observe(self, arm: Arm, compute_seconds: float) -> None:
        """A round with `arm` computed that long."""
        if compute_seconds <= 0:
            return
        reference = self._references.setdefault(arm, Ema(self.REFERENCE_WEIGHT, HICCUP))
        measured = math.log(compute_seconds)
        surprise = measured - self._log - reference.get(measured - self._log)
        surprise = min(max(surprise, -HICCUP), HICCUP)
        self._log += self.WEIGHT * reference.count / (reference.count + 2) * surprise
        reference.add(measured - self._log)

    @property
    def slower(self) -> float:
        """The factor for seconds of compute."""
        return math.exp(self._log)


class CycleModel:
    """Predicts the seconds of a round for any arm, and learns from each round.

    Compute slows down and speeds up with the machine (other programs, clocks). `_pace` follows that quickly and for
    all arms alike, so that an arm measured in a bad moment does not look worse than one that waited for a good
    one. Prefetching transfers use the processor too, so compute is measured with and without apart.
    """

    def __init__(self, k_limit: int, experts: int, top_k: int) -> None:
        self.loads = LoadEstimator(k_limit + 1, experts, top_k)
        self._costs = {False: ComputeCosts(), True: ComputeCosts()}
        self._corrections = {False: Correction(k_limit), True: Correction(k_limit)}
        self._overhead = RunningLine()
        self._hiding = Ema()  # the share of compute under which prefetched transfers proceed
        self._pace = Pace()

    def seconds(self, ks: Sequence[int], prefetch: bool, memory: Memory) -> list[float]:
        """The predictions for draft lengths `ks`; 0 before any observation."""
        drafting, plain = self._corrections[prefetch], self._corrections[False]
        raw = self._raw(ks, prefetch, memory)
        return [value * (drafting if k else plain)(k) for k, value in zip(ks, raw, strict=True)]

    def familiarity(self, arm: Arm) -> float:
        """How many rounds, with this arm and those near it, the prediction rests on."""
        return self._corrections[arm.prefetch].weight(arm.k)

    def observe(self, seen: Observation, memory: Memory) -> None:
        """Learn from a round."""
        arm = Arm(seen.k, seen.prefetch)
        self._pace.observe(arm, seen.compute_seconds)
        usual = 1 / self._pace.slower
        costs = self._costs[arm.prefetch]
        if seen.draft_passes:
            costs.draft_pass.add(seen.draft_seconds / seen.draft_passes * usual)
        costs.verify.add(seen.k + 1, seen.verify_seconds * usual)
        self._overhead.add(seen.k + 1, seen.overhead_seconds * usual)
        self.loads.observe(seen.wanted, seen.misses)
        if arm.prefetch:
            self._learn_hiding(seen, memory)
        (predicted,) = self._raw([arm.k], arm.prefetch, memory)
        if predicted > 0:
            self._corrections[arm.prefetch].add(arm.k, seen.seconds / predicted)

    def _learn_hiding(self, seen: Observation, memory: Memory) -> None:
        """What was not waited for of a round's transfers went on under compute."""
        if seen.compute_seconds <= 0:
            return
        hidden = seen.misses[-1] * memory.transfer_seconds - seen.stall_seconds
        share = min(max(hidden / seen.compute_seconds, 0.0), 1.0)
        # Where there was hardly anything to hide, more might have been.
        early = self.loads.prefetchable(seen.k, memory.slots) * memory.transfer_seconds
        self._hiding.add(share if hidden < 0.9 * early else max(share, self._hiding.get(1.0)))

    def _compute(self, k: int, prefetch: bool) -> tuple[float, float]:
        """(draft, verify) seconds at the usual speed."""
        own, other = self._costs[prefetch and k > 0], self._costs[not (prefetch and k > 0)]
        verify = own.verify(k + 1) or other.verify(k + 1)
        if k == 0:
            return 0.0, verify
        a_pass = own.draft_pass.get(other.draft_pass.get(other.verify(1) or own.verify(1)))
        return k * a_pass, verify

    def _raw(self, ks: Sequence[int], prefetch: bool, memory: Memory) -> list[float]:
        """Before the correction."""
        slower, made = self._pace.slower, []
        for k in ks:
            draft, verify = self._compute(k, prefetch)
            # The draft routes all rows of the chunk but the last.
            early = self.loads.prefetchable(k, memory.slots) if prefetch and k else 0.0
            costs = CycleCosts(
                draft=draft * slower,
                verify=verify * slower,
                transfer=self.loads.missing(k + 1) * memory.transfer_seconds,
                early=early * memory.transfer_seconds,
                overhead=self._overhead(k + 1) * slower,
                hiding=self._hiding.get(1.0),
            )
            made.append(cycle_seconds(costs))
        return made
