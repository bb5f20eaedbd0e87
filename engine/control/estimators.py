"""What the governor knows, learned from the rounds themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Weight of the newest observation: about the last ten rounds count.
EMA_WEIGHT = 0.15
# Acceptance before anything was measured; MoE-SpeQ reports "> 90 %" for an INT4 self-draft.
PRIOR_ACCEPTANCE = 0.85


class Ema:
    """An exponential moving average; the plain mean while it has seen few, so that the first one weighs no more.

    What lies further than `reach` from it, once it has seen a few, counts as if it lay there: a hiccup of the machine.
    """

    FEW = 3

    def __init__(self, weight: float = EMA_WEIGHT, reach: float = math.inf) -> None:
        self.value: float | None = None
        self.count = 0
        self._weight, self._reach = weight, reach

    def add(self, observed: float) -> None:
        self.count += 1
        if self.value is None:
            self.value = observed
            return
        step = observed - self.value
        if self.count > self.FEW:
            step = min(max(step, -self._reach), self._reach)
        self.value += max(self._weight, 1 / self.count) * step

    def get(self, default: float) -> float:
        return default if self.value is None else self.value


class FadingShare:
    """The share of hits among recent trials, starting from `trials` imagined ones with a share of `prior`.

    A short memory follows but is noisy; so it remembers `memory` trials, and forgets all but the latest `alarm`
    when those tell another story (by more than SURPRISE standard deviations).
    """

    SURPRISE = 3.5

    def __init__(self, memory: float, alarm: float, prior: float = 0.0, trials: float = 0.0) -> None:
        self.hits, self.trials = prior * trials, trials
        self._keep, self._keep_late = 1 - 1 / memory, 1 - 1 / alarm
        self._late_hits = self._late_trials = 0.0

    def add(self, hit: bool) -> None:
        self.hits, self.trials = self.hits * self._keep + hit, self.trials * self._keep + 1
        self._late_hits = self._late_hits * self._keep_late + hit
        self._late_trials = self._late_trials * self._keep_late + 1
        share = (self.hits + 1) / (self.trials + 2)  # never 0 or 1: those would make any trial a surprise
        deviation = math.sqrt(share * (1 - share) / self._late_trials)
        if abs(self._late_hits / self._late_trials - share) > self.SURPRISE * deviation:
            self.hits, self.trials = self._late_hits, self._late_trials


class AcceptanceEstimator:
    """p_j: the probability that draft token j is accepted when all before it were (MoE-SpeQ, equation 3).

    A position counts its own recent trials, and a few at the overall rate: one unlucky round of a batch of one
    must not say that the draft is never right, because a k of 0 would then learn nothing more. The memories are
    long because errors multiply: at 95 % a token, one percent more is 9 % more tokens from a draft of 16.
    """

    #: Trials that a position and the overall rate remember, and those that a position takes from the overall rate.
    MEMORY, OVERALL_MEMORY, SHARED = 40.0, 200.0, 12.0
    #: The latest trials that may overrule them.
    ALARM = 24.0

    def __init__(self, positions: int) -> None:
        self._positions = [FadingShare(self.MEMORY, self.ALARM) for _ in range(positions)]
        self._overall = FadingShare(self.OVERALL_MEMORY, self.ALARM, PRIOR_ACCEPTANCE, trials=2.0)

    def observe(self, verified: int, accepted: int) -> None:
        """A round reached `verified` draft tokens, of which the first `accepted` were accepted."""
        for j in range(verified):
            self._positions[j].add(j < accepted)
            self._overall.add(j < accepted)

    def probability(self, position: int) -> float:
        own, rate = self._positions[position], self._overall.hits / self._overall.trials
        return (own.hits + self.SHARED * rate) / (own.trials + self.SHARED)

    def expected_tokens(self, k_max: int) -> list[float]:
        """Tokens that a round with draft length k emits, for k from 0 to `k_max`: 1 + Σ_{i≤k} Π_{j≤i} p_j.

        The 1 is the bonus or corrected token, which the paper's formula leaves out.
        """
        totals, chain = [1.0], 1.0
        for j in range(k_max):
            chain *= self.probability(j)
            totals.append(totals[-1] + chain)
        return totals


class RowCurve:
    """How many distinct experts the first r rows of a chunk have in common with some set, over all layers.

    Each round tells it exactly for all r up to its own chunk (the marginal ones of the next token); beyond, the
    increments shrink as under independent routing: the chance that a row's expert is new is (1 - top_k/experts)
    per earlier row (MoESD, equation 8).
    """

    def __init__(self, rows: int, experts: int, top_k: int) -> None:
        self._counts = [Ema() for _ in range(rows)]
        self._fresh = 1 - top_k / experts
        self._most = 0
        self._curve = [0.0] * (rows + 1)

    def observe(self, counts: Sequence[float]) -> None:
        """counts[r-1]: of the first r rows."""
        for ema, count in zip(self._counts, counts, strict=False):
            ema.add(float(count))
        self._most = max(self._most, len(counts))
        known = [ema.get(0.0) for ema in self._counts[: self._most]]
        step = known[-1] - (known[-2] if self._most > 1 else 0.0)
        self._curve[1:] = known
        for _ in range(len(self._counts) - self._most):
            step *= self._fresh
            self._curve.append(max(self._curve[-1] + step, 0.0))

    def __call__(self, rows: int) -> float:
        """The estimate for `rows` >= 1; 0 before any observation."""
        return self._curve[rows]


class LoadEstimator:
    """What a chunk of r rows finds missing, and how much of that a prefetch can bring before the verification."""

    def __init__(self, rows: int, experts: int, top_k: int) -> None:
        #: Distinct experts that are wanted, and those of them that were not resident when the round began.
        self.wanted = RowCurve(rows, experts, top_k)
        self.missing = RowCurve(rows, experts, top_k)

    def observe(self, wanted: Sequence[float], missing: Sequence[float]) -> None:
        """Both as RowCurve.observe."""
        self.wanted.observe(wanted)
        self.missing.observe(missing)

    def prefetchable(self, rows: int, capacity: int) -> float:
        """Missing experts for which a cache of `capacity` slots, over all layers, has room beside those that stay.

        A wanted expert is never evicted for another, so a chunk that wants more than the cache holds waits for
        the rest however early it was known.
        """
        missing = self.missing(rows)
        return min(missing, max(capacity - (self.wanted(rows) - missing), 0.0))


class RunningLine:
    """y ≈ a + b·x with b >= 0, least squares over the recent observations (older ones fade)."""

    def __init__(self, weight: float = EMA_WEIGHT / 3) -> None:
        self._keep = 1 - weight
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._slope = self._at_zero = self._least = 0.0

    def add(self, x: float, y: float) -> None:
        """An observation at x >= 1.

        While all of them lie at one x there is no slope: half of the cost is then taken as fixed.
        """
        for name, value in (("_n", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, getattr(self, name) * self._keep + value)
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        self._slope = 0.5 * mean_y / mean_x
        if spread >= 1e-6:
            self._slope = max((self._xy / self._n - mean_x * mean_y) / spread, 0.0)
        self._at_zero = mean_y - self._slope * mean_x
        self._least = 0.1 * mean_y

    def __call__(self, x: float) -> float:
        """The estimate at x; 0 before any observation."""
        return max(self._at_zero + self._slope * x, self._least)
