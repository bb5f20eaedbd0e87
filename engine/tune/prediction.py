"""What a setting would do: tokens of a round, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import K_LIMIT
from engine.control.estimators import AcceptanceEstimator
from engine.control.iteration import Iteration
from engine.errors import UsageError
from engine.tune.family import Family, Operators, Shape
from engine.tune.probe import Probe
from engine.tune.setting import Setting


class SteadyAcceptance(AcceptanceEstimator):
    """The governor's, but nothing fades: all sample texts count alike."""

    MEMORY = OVERALL_MEMORY = ALARM = 1e6


@dataclass(frozen=True)
class Prediction:
    """`seconds` of a round, `tokens` that it emits, and why; tokens/s are those of the whole batch."""

    setting: Setting
    seconds: float
    tokens: float
    iteration: Iteration

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Predictor:
    """Predicts any setting whose family was probed."""

    def __init__(self, shape: Shape, probes: Sequence[Probe]) -> None:
        families: dict[tuple[str, str], list[Probe]] = {}
        self._acceptance: dict[str, SteadyAcceptance] = {}
        for probe in probes:
            families.setdefault(probe.setting.family, []).append(probe)
            known = self._acceptance.setdefault(probe.setting.draft, SteadyAcceptance(K_LIMIT))
            for verified, accepted in probe.lengths:
                known.observe(verified, accepted)
        drafts = dict.fromkeys(probe.setting.draft for probe in probes)
        operators = {draft: Operators([p for p in probes if p.setting.draft == draft]) for draft in drafts}
        self.families = {key: Family(shape, operators[key[0]], members) for key, members in families.items()}

    def knows(self, setting: Setting) -> bool:
        """Whether the setting's family was probed with a batch as large."""
        family = self.families.get(setting.family)
        return family is not None and setting.batch <= max(probe.setting.batch for probe in family.probes)

    def tokens(self, setting: Setting) -> float:
        """Of a round, all sequences together."""
        return setting.batch * self._acceptance[setting.draft].expected_tokens(K_LIMIT)[setting.k]

    def __call__(self, setting: Setting) -> Prediction:
        """Raises UsageError for a family that was not probed."""
        family = self.families.get(setting.family)
        if family is None:
            raise UsageError(f"nothing like {setting.name} was measured")
        seconds, iteration = family.simulate(setting)
        return Prediction(setting, seconds, self.tokens(setting), iteration)
