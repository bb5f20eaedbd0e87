"""What a policy would do on a machine with a model: plain offloading, MoE-SpeQ's, SpecMoEOff's, as roofs allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.control.cached import CachedCosts, cached_iteration
from engine.control.hardware_profile import HardwareProfile
from engine.control.iteration import Iteration
from engine.control.model_profile import ModelProfile
from engine.control.operators import Workload, attention_work, experts_work, rest_work, shared_work, weights
from engine.control.placement import (
    GIB,
    SELF_DRAFT_BITS,
    WORKSPACE,
    SmallDraft,
    cache_slots,
    expert_hops,
    largest_batch,
    self_draft_bytes,
    small_draft,
    streaming_bytes,
)
from engine.control.routing import Routing
from engine.control.streamed import StreamCosts, stream_iteration
from engine.errors import BudgetError

#: Experts that verification needs and the draft foretold. MoE-SpeQ, section 2: of the top-4 sets of Qwen1.5-MoE
#: 90.9 % are foretold, and in the others at least one of four is wrong: at most this share.
FORETOLD = 1 - 0.091 / 4
#: Micro-batches of a streamed pass (SpecMoEOff, section 5).
MICRO_BATCHES = 2
#: Parts in which a layer's weights cross the link, so that activations can pass between them (MoE-Lightning, pages).
PAGES = 8


@dataclass(frozen=True)
class Outcome:
    """A policy's iteration, what it emits (`tokens` of all sequences), and the experts a layer it keeps (`slots`)."""

    policy: str
    iteration: Iteration
    tokens: float
    slots: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.iteration.seconds


def on_demand(
    hardware: HardwareProfile, model: ModelProfile, work: Workload, routing: Routing, slots: int | None = None
) -> Outcome:
    """Decoding without speculation: an LRU cache of experts, a miss is fetched when the router asks for it."""
    work = replace(work, k=0)
    slots = cache_slots(hardware, model, work, 0.0) if slots is None else slots
    return _cached("on demand", hardware, model, work, routing, slots, foretold=0.0)


def moe_speq(
    hardware: HardwareProfile,
    model: ModelProfile,
    work: Workload,
    routing: Routing,
    slots: int | None = None,
    foretold: float = FORETOLD,
) -> Outcome:
    """A quantized copy of the experts drafts, and what its routers choose is fetched meanwhile (MoE-SpeQ)."""
    slots = cache_slots(hardware, model, work, self_draft_bytes(model)) if slots is None else slots
    return _cached("MoE-SpeQ", hardware, model, work, routing, slots, foretold)


def _cached(
    name: str,
    hardware: HardwareProfile,
    model: ModelProfile,
    work: Workload,
    routing: Routing,
    slots: int,
    foretold: float,
) -> Outcome:
    fast, rows = hardware.fast, work.rows
    needed = routing.distinct(rows)
    missing = routing.missing(rows, slots)
    known, plan = 0.0, []
    for number in range(work.k if foretold else 0):
        more = min(routing.missing(work.batch * (number + 1), slots) * foretold, float(slots)) - known
        plan.append(max(more, 0.0))
        known += plan[-1]
    one = experts_work(model, rows / needed, 1.0)  # its share of the rows
    drafting = shared_work(model, work.batch).on(fast) + experts_work(
        model, work.batch, routing.distinct(work.batch), SELF_DRAFT_BITS
    ).on(fast)
    costs = CachedCosts(
        layers=model.moe_layers,
        shared=shared_work(model, rows).on(fast) + attention_work(model, rows, work.batch, work.context).on(fast),
        resident=(needed - missing) * one.on(fast),
        expert=one.on(fast),
        load=expert_hops(hardware, model, model.expert_bytes),
        asked=max(missing - known, 0.0),
        rest=rest_work(model, rows).on(fast),
        passes=work.k,
        draft_layer=drafting + attention_work(model, work.batch, work.batch, work.context).on(fast),
        draft_rest=rest_work(model, work.batch).on(fast),
        foretold=tuple(plan),
        fast_lane=hardware.fast_lane,
    )
    return Outcome(name, cached_iteration(costs), work.batch * work.tokens, slots)


def streamed(hardware: HardwareProfile, model: ModelProfile, work: Workload, routing: Routing) -> Outcome:
    """All experts pass through a double buffer, attention runs on the CPU where keys and values are.

    With k = 0 as MoE-Lightning, else as SpecMoEOff, with a small draft that is always in fast memory.
    """
    draft = small_draft(model) if work.k else SmallDraft(0, 0, 0)
    held = model.shared_bytes + streaming_bytes(model) + 2 * draft.params + WORKSPACE
    kept = work.batch * work.longest * (model.kv_bytes() + draft.kv_bytes)
    if hardware.gpu is None:
        held += kept
    free = hardware.fast.memory_gib * GIB - held
    if free < 0:
        raise BudgetError(
            f"{held / GIB:.1f} GiB of fast memory are needed for two layers of experts and what stays;"
            f" there are {hardware.fast.memory_gib:g}"
        )
    parts = MICRO_BATCHES if work.batch >= MICRO_BATCHES else 1
    rows, sequences = work.rows / parts, work.batch / parts
    pages = min(PAGES, model.experts)
    page = expert_hops(hardware, model, model.experts * model.expert_bytes / pages, kept if hardware.gpu else 0.0)
    crossing = model.attention.heads * model.attention.value_dim * 2 * rows if hardware.gpu else 0.0
    gpu_draft, cpu_draft = _small_draft_seconds(hardware, model, work, draft, free)
    costs = StreamCosts(
        layers=model.moe_layers,
        micro_batches=parts,
        shared=shared_work(model, rows).on(hardware.fast),
        attention=attention_work(model, rows, sequences, work.context).on(hardware.cpu),
        experts=experts_work(model, rows, routing.distinct(rows)).on(hardware.fast),
        page=page,
        pages=pages,
        activations=crossing / hardware.slow_gbps / 1e9,
        rest=rest_work(model, work.rows).on(hardware.fast),
        draft_gpu=gpu_draft,
        draft_cpu=cpu_draft,
        fast_lane=hardware.fast_lane,
    )
    name = "SpecMoEOff" if work.k else "streamed, no draft"
    return Outcome(name, stream_iteration(costs), work.batch * work.tokens, 0)


def _small_draft_seconds(
    hardware: HardwareProfile, model: ModelProfile, work: Workload, draft: SmallDraft, free: float
) -> tuple[float, float]:
    """Seconds of k passes of the draft on fast memory, and of the attention that the CPU computes beside it.

    Draft data gets fast memory first (SpecMoEOff, section 5.2); the sequences whose keys and values do not fit are
    the CPU's group. On a machine without a GPU there is one group.
    """
    if not work.k:
        return 0.0, 0.0
    wanted = work.batch * work.longest * draft.kv_bytes
    on_gpu = min(free / wanted, 1.0) if hardware.gpu else 1.0
    flops, moved = (work.batch * work.context * amount for amount in (draft.attention_flops, draft.kv_bytes))
    network = weights(draft.params - model.head_params, 16, work.batch).on(hardware.fast)  # one embedding is a look-up
    gpu = network + hardware.fast.seconds(flops * on_gpu, moved * on_gpu)
    return work.k * gpu, work.k * hardware.cpu.seconds(flops * (1 - on_gpu), moved * (1 - on_gpu))


def batch_that_fits(hardware: HardwareProfile, model: ModelProfile, work: Workload) -> int:
    """The largest batch of a streamed policy on that machine."""
    draft_kv = small_draft(model).kv_bytes if work.k else 0.0
    return largest_batch(hardware, model, work.longest, draft_kv)
