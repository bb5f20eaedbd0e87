"""Which draft length next, and whether to prefetch: what promises most tokens a second (MoE-SpeQ, section 3.2)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.control.cycle import CycleModel
from engine.control.estimators import AcceptanceEstimator
from engine.control.observation import Arm, Memory, Observation
from engine.control.probes import Probes
from engine.control.roofline import rate

# Another arm must promise this much more before the governor moves: rounds are noisy.
HYSTERESIS = 1.03
# The rounds that calibrate: two drafts of this length, with prefetch and without, then none.
FIRST_K = 4

PLAIN = Arm(0, False)


@dataclass(frozen=True)
class Choice:
    """A draft length, and whether to prefetch, with the predictions for it and for every other k, from 0.

    Tokens are those of all sequences of the batch.
    """

    k: int
    prefetch: bool
    auto: bool
    probing: bool
    reason: str
    expected_tokens: list[float]
    seconds: list[float]
    rate: list[float]


class Governor:
    """Predicts Θ(k) for every k with prefetching and without, corrects it by what was measured, and picks.

    k = 0 is a candidate like any other, so a draft that does not pay is switched off; probes find out when
    that changes, at intervals that grow while they change nothing.
    """

    def __init__(self, k_limit: int, experts: int, top_k: int) -> None:
        self.acceptance = AcceptanceEstimator(k_limit)
        self.cycle = CycleModel(k_limit, experts, top_k)
        self._favourite: Arm | None = None
        self._calibration = deque([Arm(FIRST_K, True), Arm(FIRST_K, False), PLAIN])
        self._probes = Probes()

    def choose(
        self,
        k: int | str,
        k_max: int,
        prefetch: str,
        memory: Memory,
        can_draft: bool,
        room: int | None = None,
        sequences: int = 1,
    ) -> Choice:
        """The next round's draft length and prefetching.

        `k` is a fixed one or "auto"; `prefetch` is "auto", "draft", or anything else for none by the draft. No sequence
        can take more than `room` draft tokens any more (None: that is far off). Tokens are those of all `sequences`.
        """
        every_k = range(1 + (k_max if k == "auto" else max(k_max, int(k))))
        tokens = [sequences * each for each in self.acceptance.expected_tokens(every_k[-1])]
        sides = (False, True) if prefetch == "auto" else (prefetch == "draft",)
        curves = {side: self.cycle.seconds(every_k, side, memory) for side in sides}
        longest = k_max if room is None else min(room, k_max)
        ks = range(longest + 1) if k == "auto" else (int(k),)
        arms = [Arm(n, side and n > 0) for side in sides for n in ks] if can_draft else [PLAIN]
        seconds = {arm: curves[arm.prefetch or sides[0]][arm.k] for arm in arms}
        rates = {arm: rate(tokens[arm.k], seconds[arm]) for arm in seconds}
        arm, probing, reason = self._pick(rates, seconds, ending=longest < k_max)
        if not can_draft:
            reason = "no drafter: plain decoding"
        elif k != "auto":
            reason = f"k = {k} was set by hand" + (f"; {reason}" if len(seconds) > 1 else "")
        curve = curves[arm.prefetch or sides[0]]
        return Choice(
            k=arm.k,
            prefetch=arm.prefetch,
            auto=k == "auto",
            probing=probing,
            reason=reason,
            expected_tokens=tokens,
            seconds=curve,
            rate=[rate(n, s) for n, s in zip(tokens, curve, strict=True)],
        )

    def observe(self, seen: Observation, memory: Memory) -> None:
        """Learn from a round."""
        self._probes.observe(seen.tokens, seen.seconds)
        for verified, accepted in seen.lengths:
            self.acceptance.observe(verified, accepted)
        self.cycle.observe(seen, memory)

    def _pick(self, rates: dict[Arm, float], seconds: dict[Arm, float], ending: bool) -> tuple[Arm, bool, str]:
        """The arm, whether it is a probe, and why. With `ending`, no draft may be as long as it could be elsewhere."""
        arms = list(rates)
        if len(arms) == 1:
            return arms[0], False, f"nothing but {arms[0]} to choose from"
        while self._calibration:
            k, prefetch = self._calibration.popleft()
            arm = Arm(min(k, max(arms).k), prefetch)
            if arm in arms:
                return arm, True, f"measuring a round with {arm} first"
        best = max(arms, key=lambda arm: rates[arm])
        if ending:
            # Nothing to learn for the next text from drafts that were cut short.
            return best, False, f"{best}: few tokens are left to write"
        if self._favourite not in rates or rates[best] > HYSTERESIS * rates[self._favourite]:
            return best, False, self._move(best, rates)
        probe = self._probes.next(self._favourite, rates, seconds, self.cycle.familiarity)
        if probe is not None:
            other = f"{probe} without prefetch" if probe == Arm(self._favourite.k, False) else str(probe)
            return probe, True, f"probing {other} to see whether {self._favourite} is still right"
        return self._favourite, False, f"{self._favourite} still promises most: {rates[self._favourite]:.3g} tokens/s"

    def _move(self, best: Arm, rates: dict[Arm, float]) -> str:
        old, self._favourite = self._favourite, best
        self._probes.restart()
        said = f"{best} promises {rates[best]:.3g} tokens/s"
        if old is None or rates.get(old, 0.0) <= 0:
            return said
        return f"{said}, {rates[best] / rates[old] - 1:.0%} more than {old}"
