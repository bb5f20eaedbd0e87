"""T_cycle: how long a round takes, predicted from what the rounds before it took (MoE-SpeQ, equation 3)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.control.corrections import Correction, Pace
from engine.control.estimators import Ema, LoadEstimator, RunningLine
from engine.control.observation import Arm, Memory, Observation
from engine.control.roofline import CycleCosts, cycle_seconds


class ComputeCosts:
    """Seconds of compute at the machine's usual speed: a draft token, and a verification of r rows."""

    def __init__(self) -> None:
        self.draft_token = Ema()
        self.verify = RunningLine()


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
        if seen.k:
            costs.draft_token.add(seen.draft_seconds / seen.k * usual)
        costs.verify.add(seen.k + 1, seen.verify_seconds * usual)
        self._overhead.add(seen.k + 1, seen.overhead_seconds * usual)
        self.loads.observe(seen.wanted, seen.misses)
        if arm.prefetch:
            self._learn_hiding(seen, memory)
        # With what was missing now: a cold cache is no error of the formula, and no property of this k.
        predicted = self._raw_one(arm.k, arm.prefetch, memory, float(seen.misses[-1]))
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
        a_token = own.draft_token.get(other.draft_token.get(other.verify(1) or own.verify(1)))
        return k * a_token, verify

    def _raw(self, ks: Sequence[int], prefetch: bool, memory: Memory) -> list[float]:
        """Before the correction."""
        return [self._raw_one(k, prefetch, memory, self.loads.missing(k + 1)) for k in ks]

    def _raw_one(self, k: int, prefetch: bool, memory: Memory, missing: float) -> float:
        """The same for one k whose chunk finds `missing` experts absent."""
        slower = self._pace.slower
        draft, verify = self._compute(k, prefetch)
        # The draft routes all rows of the chunk but the last.
        early = min(self.loads.prefetchable(k, memory.slots), missing) if prefetch and k else 0.0
        return cycle_seconds(
            CycleCosts(
                draft=draft * slower,
                verify=verify * slower,
                transfer=missing * memory.transfer_seconds,
                early=early * memory.transfer_seconds,
                overhead=self._overhead(k + 1) * slower,
                hiding=self._hiding.get(1.0),
            )
        )
