"""What the governor knows, learned from the rounds themselves."""

from __future__ import annotations

import math

# Weight of the newest observation: about the last ten rounds count.
EMA_WEIGHT = 0.15
# Acceptance before anything was measured; MoE-SpeQ reports "> 90 %" for an INT4 self-draft.
PRIOR_ACCEPTANCE = 0.85


class Ema:
    """An exponential moving average that starts at its first observation."""

    def __init__(self, weight: float = EMA_WEIGHT) -> None:
        self.value: float | None = None
        self._weight = weight

    def add(self, observed: float) -> None:
        self.value = observed if self.value is None else self.value + self._weight * (observed - self.value)

    def get(self, default: float) -> float:
        return default if self.value is None else self.value


class FadingShare:
    """The share of hits among recent trials, starting from `trials` imagined ones with a share of `prior`."""

    def __init__(self, memory: float, prior: float = 0.0, trials: float = 0.0) -> None:
        self.hits, self.trials = prior * trials, trials
        self._keep = 1 - 1 / memory

    def add(self, hit: bool) -> None:
        self.hits, self.trials = self.hits * self._keep + hit, self.trials * self._keep + 1


class AcceptanceEstimator:
    """p_j: the probability that draft token j is accepted when all before it were (MoE-SpeQ, equation 3).

    A position counts its own recent trials, and a few at the overall rate: one unlucky round of a batch of one
    must not say that the draft is never right, because a k of 0 would then learn nothing more.
    """

    #: Trials that a position and the overall rate remember, and those that a position takes from the overall rate.
    MEMORY, OVERALL_MEMORY, SHARED = 12.0, 36.0, 4.0

    def __init__(self, positions: int) -> None:
        self._positions = [FadingShare(self.MEMORY) for _ in range(positions)]
        self._overall = FadingShare(self.OVERALL_MEMORY, PRIOR_ACCEPTANCE, trials=2.0)

    def observe(self, verified: int, accepted: int) -> None:
        """A round reached `verified` draft tokens, of which the first `accepted` were accepted."""
        for j in range(verified):
            self._positions[j].add(j < accepted)
            self._overall.add(j < accepted)

    def probability(self, position: int) -> float:
        own, rate = self._positions[position], self._overall.hits / self._overall.trials
        return (own.hits + self.SHARED * rate) / (own.trials + self.SHARED)

    def expected_tokens(self, k: int) -> float:
        """Tokens that a round with draft length k emits: 1 + Σ_{i≤k} Π_{j≤i} p_j.

        The 1 is the bonus or corrected token, which the paper's formula leaves out.
        """
        total, chain = 1.0, 1.0
        for j in range(k):
            chain *= self.probability(j)
            total += chain
        return total


class LoadEstimator:
    """M(r): experts that a chunk of r rows finds neither resident nor on their way, over all layers.

    Each round tells it exactly for all r up to its own chunk (the marginal misses of the next token);
    beyond, the increments shrink as under independent routing: the chance that a row's expert is new is
    (1 - top_k/experts) per earlier row (MoESD, equation 8).
    """

    def __init__(self, rows: int, experts: int, top_k: int) -> None:
        self._misses = [Ema() for _ in range(rows + 1)]
        self._fresh = 1 - top_k / experts
        self._most = 0

    def observe(self, misses: list[int]) -> None:
        """misses[r-1]: distinct missing experts of the first r rows."""
        for r, count in enumerate(misses, start=1):
            self._misses[r].add(float(count))
        self._most = max(self._most, len(misses))

    def misses(self, rows: int) -> float:
        known = min(rows, self._most)
        if known == 0:
            return 0.0
        value = self._misses[known].get(0.0)
        step = value - self._misses[known - 1].get(0.0) if known > 1 else value
        for _ in range(rows - known):
            step *= self._fresh
            value += step
        return max(value, 0.0)


class RunningLine:
    """y ≈ a + b·x with b >= 0, least squares over the recent observations (older ones fade)."""

    def __init__(self, weight: float = EMA_WEIGHT / 3) -> None:
        self._keep = 1 - weight
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("_n", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, getattr(self, name) * self._keep + value)

    def __call__(self, x: float) -> float:
        """The estimate at x >= 1; 0 before any observation.

        While all observations lie at one x there is no slope: half of the cost is then taken as fixed.
        """
        if not self._n:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x**2
        if spread < 1e-6:
            return mean_y * (0.5 + 0.5 * x / mean_x)
        slope = max((self._xy / self._n - mean_x * mean_y) / spread, 0.0)
        return max(mean_y + slope * (x - mean_x), 0.1 * mean_y)


class CostEstimator:
    """Seconds of compute: a draft pass, a verification of r rows, and all the rest of a round."""

    def __init__(self) -> None:
        self.draft_pass = Ema()
        self.verify = RunningLine()
        self.overhead = Ema()


class Correction:
    """How far measured cycles are from predicted ones, as a smooth function of k.

    Neighbours inform each other: a k that was tried once, in a noisy moment, must not make a spike. But plain
    decoding and drafting stand apart: what misleads the model of one (a prefetch that hides less than it
    should, say) is absent from the other.
    """

    #: How fast an observation loses weight with the distance in k, and how many count at most.
    REACH, MOST = 2.0, 8.0
    #: How far a measured cycle may correct a predicted one.
    LOW, HIGH = 0.25, 4.0

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Ema, float]] = {}

    def add(self, k: int, measured_over_predicted: float) -> None:
        ema, count = self._seen.get(k, (Ema(), 0.0))
        ema.add(math.log(min(max(measured_over_predicted, self.LOW), self.HIGH)))
        self._seen[k] = (ema, min(count + 1, self.MOST))

    def __call__(self, k: int) -> float:
        """The factor for predictions at k; 1 before any observation."""
        weights = {
            seen: count * math.exp(-abs(seen - k) / self.REACH)
            for seen, (_, count) in self._seen.items()
            if (seen == 0) == (k == 0)
        }
        if not weights:
            return 1.0
        mean = sum(weight * self._seen[seen][0].get(0.0) for seen, weight in weights.items()) / sum(weights.values())
        return math.exp(mean)
