"""One iteration in which every layer's experts stream through a double buffer (MoE-Lightning, SpecMoEOff).

The target runs first, then the draft (SpecMoEOff, section 5). In each layer, a micro-batch passes its projections,
its attention (over keys and values in host memory: on the CPU), then the experts, once the layer's weights are
there. Micro-batches overlap: while one is at the experts, the next is at attention. The two halves of the draft,
keys and values on the GPU and in host memory, run side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.iteration import Hops, Iteration
from engine.control.simulator import Plan, simulate

#: The steady state is measured in the third of four: before it the pipeline has filled, after it the link goes on.
ROUNDS, MEASURED = 4, 2


@dataclass(frozen=True)
class StreamCosts:
    """Seconds: of a layer and micro-batch (`shared`, `attention`, `experts`, `activations` over the link), of one of
    the `pages` of a layer's weights, hop by hop (`page`), and of an iteration (`rest`, `draft_gpu`, `draft_cpu`,
    `others`)."""

    layers: int
    micro_batches: int
    attention: float
    experts: float
    page: Hops
    pages: int = 1
    shared: float = 0.0
    activations: float = 0.0
    rest: float = 0.0
    draft_gpu: float = 0.0
    draft_cpu: float = 0.0
    others: float = 0.0
    attention_lane: str = "cpu"
    fast_lane: str = "gpu"


def stream_iteration(costs: StreamCosts) -> Iteration:
    """The iteration in its steady state."""
    plan = Plan()
    done: list[list[int]] = []  # the experts' tasks of each layer so far, which free its buffer
    after: list[int] = []
    targets, ends = [], []
    for _ in range(ROUNDS):
        for _ in range(costs.layers):
            loaded = _load(plan, costs, done[-2] if len(done) > 1 else [])
            after = _layer(plan, costs, after, loaded)
            done.append(after)
        after = [plan.add("rest", costs.fast_lane, costs.rest, after)]
        targets.append(after[0])
        after = [
            plan.add("draft on the GPU", costs.fast_lane, costs.draft_gpu, after),
            plan.add("draft on the CPU", "cpu", costs.draft_cpu, after),
        ]
        after = [plan.add("others", costs.fast_lane, costs.others, after)]
        ends.append(after[0])
    schedule = simulate(plan.tasks)
    begin, end = schedule.end[ends[MEASURED - 1]], schedule.end[ends[MEASURED]]
    target = schedule.end[targets[MEASURED]] - begin
    seconds = end - begin
    busy = {lane: worked / seconds for lane, worked in schedule.busy(begin, end).items()}
    return Iteration(seconds, target, seconds - target - costs.others, busy, schedule.spans(begin, end))


def _load(plan: Plan, costs: StreamCosts, freed: list[int]) -> list[int]:
    """The weights of one layer, page by page, once the buffer is free: the last task of each page."""
    last = []
    for _ in range(costs.pages):
        after = list(freed)
        for lane, seconds in costs.page:
            after = [plan.add("weights", lane, seconds, after, priority=1)]
        last += after
    return last


def _layer(plan: Plan, costs: StreamCosts, before: list[int], loaded: list[int]) -> list[int]:
    """One layer of all micro-batches; `before` are the tasks of the layer before, one a micro-batch (or one for all).

    Whoever is further back in the queue waits: activations overtake weights on the link (priority 0).
    """
    ends = []
    for number in range(costs.micro_batches):
        after = before[number : number + 1] if len(before) == costs.micro_batches else before
        after = [plan.add("shared", costs.fast_lane, costs.shared, after)]
        after = [plan.add("attention", costs.attention_lane, costs.attention, after)]
        if costs.activations:
            after = [plan.add("activations", costs.page[-1][0], costs.activations, after)]
        ends.append(plan.add("experts", costs.fast_lane, costs.experts, [*after, *loaded]))
    return ends
