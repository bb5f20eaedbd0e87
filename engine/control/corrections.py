"""What the formulas miss: how the machine's speed changes, and how far predictions are from what was measured."""

from __future__ import annotations

import math

from engine.control.estimators import Ema
from engine.control.observation import Arm

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
