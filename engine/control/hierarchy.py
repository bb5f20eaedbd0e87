"""The hierarchical roofline (MoE-Lightning's HRM; SpecMoEOff, section 3): one point a phase, and who binds.

An operator on processor i whose data comes from memory j runs at min(P_i, B_i · I_i, B_ji · I_j): arithmetic, its
own memory, the link between; I are its FLOP per byte at each level.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.hardware_profile import HardwareProfile, Processor
from engine.control.model_profile import ModelProfile
from engine.control.operators import Work, Workload, attention_work, experts_work, shared_work, weights
from engine.control.placement import small_draft
from engine.control.routing import Routing
from engine.errors import UsageError


@dataclass(frozen=True)
class RoofPoint:
    """One phase on one processor: `intensity` in FLOP a byte of its memory, `link_intensity` in FLOP a byte moved
    to it (None where nothing is moved), `tflops` that the roofs allow, and which roof that is."""

    phase: str
    where: str
    intensity: float
    link_intensity: float | None
    tflops: float
    peak: float
    binds: str

    @property
    def utilisation(self) -> float:
        """Of the processor's peak."""
        return self.tflops / self.peak


def place(hardware: HardwareProfile, phase: str, where: str, work: Work, moved: float = 0.0) -> RoofPoint:
    """The point of `work` on the gpu or cpu when `moved` bytes come over the link (or from disk) first."""
    processor = hardware.cpu if where == "cpu" else hardware.fast
    intensity = work.flops / work.moved
    over_link = work.flops / moved if moved else None
    roofs = {"arithmetic": processor.tflops, f"{where} memory": processor.memory_gbps * intensity / 1e3}
    if over_link is not None:
        roofs[f"the {hardware.slow_lane}"] = hardware.slow_gbps * over_link / 1e3
    binds = min(roofs, key=lambda roof: roofs[roof])
    return RoofPoint(phase, where, intensity, over_link, roofs[binds], processor.tflops, binds)


def roof_points(hardware: HardwareProfile, model: ModelProfile, work: Workload, routing: Routing) -> list[RoofPoint]:
    """Draft, verifying attention on either side, projections, and the experts as they cross the link."""
    lane = hardware.fast_lane
    attention = attention_work(model, work.rows, work.batch, work.context)
    experts = experts_work(model, work.rows, routing.distinct(work.rows))
    draft = weights(small_draft(model).params, 16, work.batch)
    points = [
        place(hardware, "draft", lane, draft),
        place(hardware, "verify attention", "cpu", attention),
        place(hardware, "projections", lane, shared_work(model, work.rows)),
        place(hardware, "experts", lane, experts, experts.moved),
    ]
    if hardware.gpu:
        points.insert(2, place(hardware, "verify attention, moved", "gpu", attention, attention.moved))
    return points


@dataclass(frozen=True)
class TurningPoints:
    """FLOP/byte. Below `move` the CPU is faster on data in host memory than the link could feed a GPU; below
    `saturate` the link limits the GPU, above it the GPU limits itself."""

    move: float
    saturate: float


def turning_points(hardware: HardwareProfile, cpu_intensity: float, gpu_intensity: float) -> TurningPoints:
    """P1 and P2 of MoE-Lightning, section 3: Ī₁ = min(P_cpu, B_cpu · I) / B_link, Ī₂ = min(P_gpu, B_gpu · I) / B_link.

    Raises UsageError without a GPU, as nothing can be moved to it.
    """
    if hardware.gpu is None or hardware.link_gbps is None:
        raise UsageError(f"{hardware.name} has no GPU, so no link to one: turning points need both")

    def attainable(processor: Processor, intensity: float) -> float:
        return min(processor.tflops * 1e3, processor.memory_gbps * intensity)

    return TurningPoints(
        move=attainable(hardware.cpu, cpu_intensity) / hardware.link_gbps,
        saturate=attainable(hardware.gpu, gpu_intensity) / hardware.link_gbps,
    )
