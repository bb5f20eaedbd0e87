"""What the governor knows, learned from the rounds themselves."""

from __future__ import annotations

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


class AcceptanceEstimator:
    """p_j: the probability that draft token j is accepted when all before it were (MoE-SpeQ, equation 3).

    Positions never reached yet take the overall rate.
    """

    def __init__(self, positions: int) -> None:
        self._positions = [Ema() for _ in range(positions)]
        self._overall = Ema(EMA_WEIGHT / 3)

    def observe(self, verified: int, accepted: int) -> None:
        """A round reached `verified` draft tokens, of which the first `accepted` were accepted."""
        for j in range(verified):
            hit = float(j < accepted)
            self._positions[j].add(hit)
            self._overall.add(hit)

    def probability(self, position: int) -> float:
        return self._positions[position].get(self._overall.get(PRIOR_ACCEPTANCE))

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


class CostEstimator:
    """Seconds of compute: a draft pass, and a verification of r rows (a line through what was measured)."""

    def __init__(self) -> None:
        self.draft_pass = Ema()
        self.overhead = Ema()
        self._by_rows: dict[int, Ema] = {}

    def observe_verify(self, rows: int, seconds: float) -> None:
        self._by_rows.setdefault(rows, Ema()).add(seconds)

    def verify(self, rows: int) -> float:
        """Compute seconds of a pass over `rows` rows, without waiting for experts."""
        points = {r: ema.get(0.0) for r, ema in self._by_rows.items()}
        if rows in points:
            return points[rows]
        if not points:
            return 0.0
        if len(points) == 1:
            only, seconds = next(iter(points.items()))
            # One point gives no slope: assume half of it is fixed, which small batches on CPUs and GPUs roughly show.
            return seconds * (0.5 + 0.5 * rows / only)
        mean_r = sum(points) / len(points)
        mean_s = sum(points.values()) / len(points)
        spread = sum((r - mean_r) ** 2 for r in points)
        slope = max(sum((r - mean_r) * (s - mean_s) for r, s in points.items()) / spread, 0.0)
        return max(mean_s + slope * (rows - mean_r), min(points.values()) * 0.5)
