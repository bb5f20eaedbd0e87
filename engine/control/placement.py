"""What fits where: fast memory for what computes, host memory or disk for the experts. Every byte is charged."""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.hardware_profile import HardwareProfile
from engine.control.iteration import Hops
from engine.control.model_profile import ModelProfile
from engine.control.operators import Workload
from engine.errors import BudgetError

GIB = 2**30
#: Activations of a pass (SpecMoEOff, section 5.2: 1 GB of a 24 GB GPU).
WORKSPACE = 1 * GIB
#: INT4 with a 16-bit scale for each 128 weights (MoE-SpeQ, section 3.4).
SELF_DRAFT_BITS = 4 + 16 / 128
#: Two layers of experts: one computes while the next one arrives (SpecMoEOff, section 5.2: 5.25 GB for Mixtral).
BUFFERS = 2


@dataclass(frozen=True)
class SmallDraft:
    """A draft of one layer on the target's hidden states (EAGLE): weights, and KV values of a token."""

    params: float
    kv_bytes: float
    attention_flops: float


def small_draft(model: ModelProfile) -> SmallDraft:
    """One decoder layer of the target's width, without routing, every query head with keys and values of its own.

    SpecMoEOff's section 5.2 has four times the target's KV a layer, as in this rule; its weights (1.63 GB) are
    a fifth more than here, where the network is as wide as the experts that a token passes.
    """
    values = model.attention.heads * model.attention.value_dim
    network = 3 * model.hidden * (model.top_k * model.expert_intermediate + model.shared_intermediate)
    params = 2 * model.hidden**2 + 4 * model.hidden * values + network + 2 * model.head_params
    return SmallDraft(params, 2 * 2 * values, 4 * values)


def self_draft_bytes(model: ModelProfile) -> float:
    """A quantized copy of all routed experts; everything else is shared with the target."""
    return model.moe_layers * model.experts * model.expert_params * SELF_DRAFT_BITS / 8


def cache_slots(hardware: HardwareProfile, model: ModelProfile, workload: Workload, draft_bytes: float) -> int:
    """Experts a layer that fast memory holds beside everything else. Raises BudgetError when it holds none."""
    fixed = model.shared_bytes + draft_bytes + WORKSPACE + workload.batch * workload.longest * model.kv_bytes()
    free = hardware.fast.memory_gib * GIB - fixed
    slots = int(free // (model.moe_layers * model.expert_bytes))
    if slots < 1:
        one = (fixed + model.moe_layers * model.expert_bytes) / GIB
        raise BudgetError(
            f"{one:.1f} GiB of fast memory are needed for one expert a layer beside shared weights, draft"
            f" ({draft_bytes / GIB:.1f}) and KV; there are {hardware.fast.memory_gib:g}"
        )
    return min(slots, model.experts)


def expert_hops(hardware: HardwareProfile, model: ModelProfile, moved: float, host_used: float = 0.0) -> Hops:
    """How `moved` bytes of experts reach fast memory when `host_used` bytes of host memory hold something else.

    What host memory cannot hold is read from disk first. Raises BudgetError when there is no disk to read from.
    """
    if hardware.gpu is None:
        return (("disk", moved / hardware.slow_gbps / 1e9),)
    link = ("link", moved / hardware.slow_gbps / 1e9)
    free = hardware.cpu.memory_gib * GIB - host_used
    on_disk = 1 - max(free, 0.0) / model.experts_bytes
    if on_disk <= 0:
        return (link,)
    if hardware.disk_gbps is None:
        raise BudgetError(
            f"the experts take {model.experts_bytes / GIB:.1f} GiB and {free / GIB:.1f} GiB of host memory are free:"
            " take a smaller batch or shorter sequences"
        )
    return (("disk", on_disk * moved / hardware.disk_gbps / 1e9), link)


def largest_batch(hardware: HardwareProfile, model: ModelProfile, longest: int, draft_kv: float = 0.0) -> int:
    """Sequences of `longest` tokens whose keys and values fit into host memory beside the experts.

    SpecMoEOff takes the largest (section 5.3). Raises BudgetError when not even one fits.
    """
    held = model.experts_bytes if hardware.gpu else model.shared_bytes + WORKSPACE + streaming_bytes(model)
    free = hardware.cpu.memory_gib * GIB - held
    batch = int(free // (longest * (model.kv_bytes() + draft_kv)))
    if batch < 1:
        raise BudgetError(
            f"{held / GIB:.1f} GiB of {hardware.cpu.memory_gib:g} hold weights, and no sequence of {longest} tokens"
            " fits beside them: take shorter sequences or another machine"
        )
    return batch


def streaming_bytes(model: ModelProfile) -> float:
    """The double buffer."""
    return BUFFERS * model.experts * model.expert_bytes
