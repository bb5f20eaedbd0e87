"""Fits of what was measured, and a round that follows from them through the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.control.cached import CachedCosts, cached_iteration
from engine.control.iteration import Iteration
from engine.control.routing import UniformRouting
from engine.control.streamed import StreamCosts, stream_iteration
from engine.tune.fits import Linear, Surface, fit_linear
from engine.tune.probe import Probe
from engine.tune.setting import Setting


@dataclass(frozen=True)
class Shape:
    """What of the model and the link a prediction needs. `lane`: "disk" or "link"."""

    layers: int
    experts: int
    top_k: int
    lane: str


@dataclass(frozen=True)
class Costs:
    """Seconds of a round's parts, and experts a layer, for one setting."""

    pass_: float
    shared: float
    experts: float
    head: float
    overhead: float
    load: float
    wanted: float
    asked: float
    foreseen: float


class Operators:
    """Fits of one draft's probes (SpecMoEOff, section 5.3: operators are linear in their rows)."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        rows = [(float(p.setting.batch * (p.setting.k + 1)),) for p in probes]
        self.shared = fit_linear(rows, [p.shared for p in probes])
        self.head = fit_linear(rows, [p.head for p in probes])
        self.overhead = fit_linear(rows, [p.overhead for p in probes])
        # Experts are read once however many rows they have, so both count.
        both = [(*r, p.wanted) for r, p in zip(rows, probes, strict=True)]
        self.experts = fit_linear(both, [p.experts for p in probes])
        drafting = [p for p in probes if p.setting.k]
        passes = [(float(p.setting.batch),) for p in drafting]
        self.pass_ = fit_linear(passes, [p.pass_ for p in drafting]) if drafting else Linear((0.0, 0.0))


class Family:
    """What settings of one draft and prefetch fetch, and how far the simulator is off for them (`correction`)."""

    def __init__(self, shape: Shape, operators: Operators, probes: Sequence[Probe]) -> None:
        self.shape, self.operators, self.probes = shape, operators, probes
        self.uniform = UniformRouting(shape.experts, shape.top_k)
        loads = [p.load for p in probes if p.load]
        self.load = sum(loads) / len(loads) if loads else 0.0
        self.wanted, self.asked, self.foreseen = (self._surface(name) for name in ("wanted", "asked", "foreseen"))
        self.correction = 1.0
        ratios = [math.log(p.seconds / self.simulate(p.setting)[0]) for p in probes]
        self.correction = math.exp(sum(ratios) / len(ratios))

    def to_json(self) -> dict[str, Any]:
        """The fits: weights of 1, then of what each operator is linear in."""
        return {
            "draft pass: 1, sequences": self.operators.pass_.weights,
            "shared: 1, rows": self.operators.shared.weights,
            "experts: 1, rows, distinct experts a layer": self.operators.experts.weights,
            "head: 1, rows": self.operators.head.weights,
            "overhead: 1, rows": self.operators.overhead.weights,
            "load": self.load,
            "correction": self.correction,
        }

    def _surface(self, name: str) -> Surface:
        return Surface(self.uniform, tuple((p.setting.batch, p.setting.k + 1, getattr(p, name)) for p in self.probes))

    def costs(self, setting: Setting) -> Costs:
        """Of a round with this setting."""
        rows = float(setting.batch * (setting.k + 1))
        at = setting.batch, setting.k + 1
        wanted = min(self.wanted(*at), float(self.shape.experts))
        # A cache of another size than the probes' misses more or less, as independent routing would.
        probed = sum(p.setting.slots for p in self.probes) / len(self.probes)
        now, then = (self.uniform.missing(rows, round(s / self.shape.layers)) for s in (setting.slots, probed))
        scale = now / then if then else 1.0
        return Costs(
            pass_=self.operators.pass_(float(setting.batch)),
            shared=self.operators.shared(rows),
            experts=self.operators.experts(rows, wanted),
            head=self.operators.head(rows),
            overhead=self.operators.overhead(rows),
            load=self.load,
            wanted=wanted,
            asked=min(self.asked(*at) * scale, wanted),
            foreseen=min(self.foreseen(*at) * scale, 2.0 * wanted),
        )

    def simulate(self, setting: Setting) -> tuple[float, Iteration]:
        """(seconds of a round, what the simulator says of it)."""
        costs = self.costs(setting)
        simulated = self._streamed if setting.prefetch == "stream" else self._cached
        seconds, iteration = simulated(setting, costs)
        return seconds * self.correction, iteration

    def _streamed(self, setting: Setting, costs: Costs) -> tuple[float, Iteration]:
        layers = self.shape.layers
        iteration = stream_iteration(
            StreamCosts(
                layers=layers,
                micro_batches=1,
                attention=costs.shared / layers,
                experts=costs.experts / layers,
                page=((self.shape.lane, costs.load * (costs.asked + costs.foreseen)),),
                rest=costs.head,
                draft_cpu=setting.k * costs.pass_,
                others=costs.overhead,
                fast_lane="cpu",
            )
        )
        return iteration.seconds, iteration

    def _cached(self, setting: Setting, costs: Costs) -> tuple[float, Iteration]:
        layers = self.shape.layers
        foretold = self._foretold(setting, costs)
        asked = costs.asked + costs.foreseen - sum(foretold)
        arriving = min((asked + sum(foretold)) / costs.wanted, 1.0) if costs.wanted else 0.0
        loads = math.ceil(asked - 1e-9) + sum(math.ceil(part - 1e-9) for part in foretold)
        iteration = cached_iteration(
            CachedCosts(
                layers=layers,
                shared=costs.shared / layers,
                resident=costs.experts / layers * (1 - arriving),
                expert=costs.experts / layers * arriving / loads if loads else 0.0,
                load=((self.shape.lane, costs.load),),
                asked=asked,
                rest=costs.head,
                passes=setting.k,
                draft_layer=costs.pass_ / layers,
                foretold=foretold,
                fast_lane="cpu",
            )
        )
        return iteration.seconds + costs.overhead, iteration

    def _foretold(self, setting: Setting, costs: Costs) -> tuple[float, ...]:
        """What each draft pass adds, in the proportions of independent routing, as far as there are slots for it."""
        if setting.prefetch != "draft" or not setting.k:
            return ()
        kept = max(costs.wanted - costs.asked - costs.foreseen, 0.0)
        room = max(setting.slots / self.shape.layers - kept, 0.0)
        distinct = [self.uniform.distinct(setting.batch * passes) for passes in range(setting.k + 1)]
        ahead = min(costs.foreseen, room)
        return tuple(ahead * (b - a) / distinct[-1] for a, b in zip(distinct, distinct[1:], strict=False))
