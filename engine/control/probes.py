"""When to try something else than what promises most, and what: predictions of what was never tried may be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from engine.control.observation import Arm

# Rounds between two probes; doubled after a probe that brings nothing new.
FIRST_INTERVAL, LONGEST_INTERVAL = 4, 48
#: Probes may cost this share of all time, and in advance what a few rounds take.
COST_SHARE, ADVANCE_ROUNDS = 0.015, 2.0
#: An arm that was never measured may be this much better than predicted; one measured n times, sqrt(1 + n) times less.
OPTIMISM = 0.3
#: How much longer or shorter another draft of the favourite's kind is.
STEP = 1.5
#: A probe that is this much better than predicted is followed by others soon.
SURPRISE = 1.5
LONGEST = "longest"


class Probes:
    """Picks the arm that might be best after all, seldom enough that looking costs next to nothing.

    Plain decoding, drafting, and drafting with prefetch take turns: arms of one kind share what is known of them,
    so that a wrong idea of one kind is found out only by trying that kind. Of the favourite's own kind, a clearly
    longer and a clearly shorter draft have a turn each, and before all others, once, the longest there is. The cost of
    a probe is what it takes longer than the favourite would have taken for the same tokens.
    """

    def __init__(self) -> None:
        self._since, self._interval = 0, FIRST_INTERVAL
        self._elapsed = self._spent = 0.0
        self._stretched = False
        self._turns: list[str] = []  # kinds, the one that waited longest first
        self._under_way: tuple[float, float] | None = None  # the rates that probe and favourite promised

    def restart(self) -> None:
        """There is a new favourite: its rivals deserve another look soon."""
        self._since, self._interval = 0, FIRST_INTERVAL

    def next(
        self,
        favourite: Arm,
        rates: Mapping[Arm, float],
        seconds: Mapping[Arm, float],
        familiarity: Callable[[Arm], float],
    ) -> Arm | None:
        """The arm to probe in the coming round, if it is time for one and it can be paid."""
        self._since += 1
        if self._since < self._interval or rates[favourite] <= 0:
            return None
        rivals = self._longest(favourite, rates) | _rivals(favourite, rates, familiarity)
        self._turns += [kind for kind in rivals if kind not in self._turns]
        allowed = COST_SHARE * self._elapsed + ADVANCE_ROUNDS * seconds[favourite] - self._spent
        for kind in self._turns:
            arm = rivals.get(kind)
            if arm is not None and seconds[arm] * (1 - rates[arm] / rates[favourite]) <= allowed:
                self._turns.remove(kind)
                self._stretched = self._stretched or kind == LONGEST
                self._since, self._interval = 0, min(2 * self._interval, LONGEST_INTERVAL)
                self._under_way = (rates[arm], rates[favourite])
                return arm
        return None

    def _longest(self, favourite: Arm, rates: Mapping[Arm, float]) -> dict[str, Arm]:
        """The longest draft of the favourite's kind, once: what so many rows miss and take is far from what few do.

        On fast links, where 16 was best, predictions from short rounds alone kept the governor at 6 to 13.
        """
        longest = max(arm for arm in rates if arm.prefetch == favourite.prefetch)
        if self._stretched or not favourite.k or longest.k < STEP * favourite.k:
            return {}
        return {LONGEST: longest} if rates[longest] * (1 + OPTIMISM) > rates[favourite] else {}

    def observe(self, tokens: float, seconds: float) -> None:
        """What the round took, and the tokens that it brought."""
        self._elapsed += seconds
        if self._under_way is None:
            return
        promised, favourite = self._under_way
        self._under_way = None
        self._spent += max(seconds - tokens / favourite, 0.0)
        if tokens > SURPRISE * promised * seconds:
            self.restart()


def _rivals(favourite: Arm, rates: Mapping[Arm, float], familiarity: Callable[[Arm], float]) -> dict[str, Arm]:
    """The arm to try of each kind."""

    def hope(arm: Arm) -> float:
        return rates[arm] * (1 + OPTIMISM / math.sqrt(1 + familiarity(arm)))

    kinds: dict[str, list[Arm]] = {}
    for arm in rates:
        kinds.setdefault("plain" if not arm.k else "prefetch" if arm.prefetch else "draft", []).append(arm)
    rivals = {kind: max(arms, key=hope) for kind, arms in kinds.items() if favourite not in arms}
    own = next(arms for arms in kinds.values() if favourite in arms)
    longer = [arm for arm in own if arm.k >= STEP * favourite.k]
    shorter = [arm for arm in own if arm.k <= favourite.k / STEP]
    if favourite.k and longer:
        rivals["longer"] = min(longer)
    if favourite.k and shorter:
        rivals["shorter"] = max(shorter)
    return rivals
