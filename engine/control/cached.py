"""One round with a cache of experts: fetched on demand, or while a draft of the model itself runs (MoE-SpeQ).

A pass of the draft tells which experts one more row of the verifying pass wants; those that are neither resident nor
on their way are fetched while the next passes run. What the draft could not tell (the last row, a wrong guess, or
no slot to keep it in) is fetched when the layer's own router asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.control.iteration import Hops, Iteration
from engine.control.simulator import Plan, simulate


@dataclass(frozen=True)
class CachedCosts:
    """A round of `passes` draft passes and one of the target.

    Of a layer: seconds of `shared` (projections and attention), `resident` (experts that are there), `expert` (one
    that arrives), `draft_layer`; `load`: one expert's way into fast memory. `rest` and `draft_rest`: seconds a pass.
    `foretold[j]`: experts of a layer that pass j adds to those to fetch, as many at most as there are slots;
    `asked`: the others, which verification fetches.
    """

    layers: int
    shared: float
    resident: float
    expert: float
    load: Hops
    asked: float
    rest: float = 0.0
    passes: int = 0
    draft_layer: float = 0.0
    draft_rest: float = 0.0
    foretold: tuple[float, ...] = ()
    fast_lane: str = "gpu"


def cached_iteration(costs: CachedCosts) -> Iteration:
    """The round; nothing of it overlaps with the next."""
    plan = Plan()
    after: list[int] = []
    coming: list[list[int]] = [[] for _ in range(costs.layers)]
    for number in range(costs.passes):
        for layer in range(costs.layers):
            after = [plan.add("draft", costs.fast_lane, costs.draft_layer, after)]
            if number < len(costs.foretold):
                coming[layer] += _loads(plan, costs, costs.foretold[number], after, priority=1 + layer)
        after = [plan.add("draft head", costs.fast_lane, costs.draft_rest, after)]
    drafted = after
    for layer in range(costs.layers):
        routed = [plan.add("shared", costs.fast_lane, costs.shared, after)]
        arriving = coming[layer] + _loads(plan, costs, costs.asked, routed, priority=0)
        after = [plan.add("resident", costs.fast_lane, costs.resident, routed)]
        after += [plan.add("expert", costs.fast_lane, costs.expert, [*routed, load]) for load in arriving]
    end = plan.add("head", costs.fast_lane, costs.rest, after)
    schedule = simulate(plan.tasks)
    draft = schedule.end[drafted[0]] if drafted else 0.0
    seconds = schedule.end[end]
    busy = {lane: worked / seconds for lane, worked in schedule.busy().items()}
    return Iteration(seconds, seconds - draft, draft, busy, schedule.spans())


def _loads(plan: Plan, costs: CachedCosts, experts: float, after: list[int], priority: int) -> list[int]:
    """Loads of a mean number of experts: whole ones, and one for the part that remains."""
    name = "prefetch" if priority else "load"
    ends = []
    for number in range(math.ceil(experts - 1e-9)):
        part = min(1.0, experts - number)
        then = list(after)
        for lane, seconds in costs.load:
            then = [plan.add(name, lane, seconds * part, then, priority)]
        ends += then
    return ends
