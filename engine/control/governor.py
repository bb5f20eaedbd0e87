"""Which draft length next: the k that promises most tokens a second, from measured costs (MoE-SpeQ, section 3.2)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.control.estimators import AcceptanceEstimator, Correction, CostEstimator, LoadEstimator
from engine.control.roofline import CycleCosts, cycle_seconds, rate

# Another k must promise this much more before the governor moves: rounds are noisy.
HYSTERESIS = 1.05
# Rounds between two probes of another k; doubled after a probe that changes nothing.
FIRST_PROBE_INTERVAL = 12
LONGEST_PROBE_INTERVAL = 192
# The rounds that calibrate: one draft of this length, then one without.
FIRST_K = 4


@dataclass(frozen=True)
class Observation:
    """What one round cost and brought. Times in seconds; `misses[r-1]` as LoadEstimator.observe.

    `verify_seconds` excludes waiting (`stall_seconds`); `seconds` is the whole round; `lengths` holds
    (verified, accepted) of each sequence; `tokens` were emitted by all of them.
    """

    k: int
    draft_passes: int
    draft_seconds: float
    verify_seconds: float
    stall_seconds: float
    overhead_seconds: float
    seconds: float
    tokens: int
    lengths: list[tuple[int, int]]
    misses: list[int]


@dataclass(frozen=True)
class Choice:
    """A draft length with the predictions it rests on, indexed by k from 0."""

    k: int
    auto: bool
    probing: bool
    reason: str
    expected_tokens: list[float]
    seconds: list[float]
    rate: list[float]


class Governor:
    """Predicts Θ(k) for every k, corrects it by what was measured, and picks.

    k = 0 is a candidate like any other, so a draft that does not pay is switched off; probes find out when
    that changes, at intervals that grow while they change nothing.
    """

    def __init__(self, k_limit: int, experts: int, top_k: int) -> None:
        self.acceptance = AcceptanceEstimator(k_limit)
        self.loads = LoadEstimator(k_limit + 1, experts, top_k)
        self.costs = CostEstimator()
        self._correction = Correction()
        self._k = FIRST_K
        self._calibration = deque([FIRST_K, 0])
        self._since_probe = 0
        self._interval = FIRST_PROBE_INTERVAL
        self._probe_down = True

    def choose(
        self, asked: int | str, k_max: int, transfer_seconds: float, prefetching: bool, can_draft: bool
    ) -> Choice:
        """The next round's draft length.

        `asked` is a fixed k or "auto"; `transfer_seconds` is what the link takes for one expert.
        """
        top = k_max if asked == "auto" else max(k_max, int(asked))
        tokens = [self.acceptance.expected_tokens(k) for k in range(top + 1)]
        seconds = [self._cycle(k, transfer_seconds, prefetching) for k in range(top + 1)]
        rates = [rate(n, s) for n, s in zip(tokens, seconds, strict=True)]
        k, probing, reason = self._pick(asked, k_max, rates, can_draft)
        return Choice(k, asked == "auto", probing, reason, tokens, seconds, rates)

    def observe(self, seen: Observation, transfer_seconds: float, prefetching: bool) -> None:
        """Learn from a round."""
        for verified, accepted in seen.lengths:
            self.acceptance.observe(verified, accepted)
        if seen.draft_passes:
            self.costs.draft_pass.add(seen.draft_seconds / seen.draft_passes)
        self.costs.verify.add(seen.k + 1, seen.verify_seconds)
        self.costs.overhead.add(seen.overhead_seconds)
        self.loads.observe(seen.misses)
        predicted = self._predicted(seen.k, transfer_seconds, prefetching)
        if predicted > 0:
            self._correction.add(seen.k, seen.seconds / predicted)

    def _predicted(self, k: int, transfer_seconds: float, prefetching: bool) -> float:
        # Prefetching asks for one more draft pass, which learns the last token's routes.
        passes = k + int(prefetching) if k else 0
        return cycle_seconds(
            CycleCosts(
                draft=passes * self.costs.draft_pass.get(self.costs.verify(1)),
                verify=self.costs.verify(k + 1),
                transfer=self.loads.misses(k + 1) * transfer_seconds,
                overhead=self.costs.overhead.get(0.0),
                prefetching=prefetching and k > 0,
            )
        )

    def _cycle(self, k: int, transfer_seconds: float, prefetching: bool) -> float:
        """Predicted seconds, corrected by what was measured at this and at nearby k."""
        return self._predicted(k, transfer_seconds, prefetching) * self._correction(k)

    def _pick(self, asked: int | str, k_max: int, rates: list[float], can_draft: bool) -> tuple[int, bool, str]:
        if not can_draft:
            return 0, False, "no drafter: plain decoding"
        if asked != "auto":
            return int(asked), False, f"k = {asked} was set by hand"
        if self._calibration:
            k = min(self._calibration.popleft(), k_max)
            return k, True, f"measuring a round with k = {k} first"
        self._k = min(self._k, k_max)
        best = max(range(k_max + 1), key=lambda k: rates[k])
        if best != self._k and rates[best] > HYSTERESIS * rates[self._k]:
            gain = rates[best] / rates[self._k] - 1 if rates[self._k] > 0 else 0.0
            reason = f"k = {best} promises {rates[best]:.3g} tokens/s, {gain:.0%} more than k = {self._k}"
            self._k, self._interval, self._since_probe = best, FIRST_PROBE_INTERVAL, 0
            return best, False, reason
        self._since_probe += 1
        if self._since_probe >= self._interval:
            return self._probe(k_max)
        return self._k, False, f"k = {self._k} still promises most: {rates[self._k]:.3g} tokens/s"

    def _probe(self, k_max: int) -> tuple[int, bool, str]:
        self._since_probe = 0
        self._interval = min(2 * self._interval, LONGEST_PROBE_INTERVAL)
        self._probe_down = not self._probe_down
        step = -1 if self._probe_down else 1
        k = self._k + step
        if not 0 <= k <= k_max:
            k = self._k - step
        k = min(max(k, 0), k_max)
        return k, True, f"probing k = {k} to see whether k = {self._k} is still right"
