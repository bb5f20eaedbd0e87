"""What the command reports: policies on a machine, and the papers' figures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from engine.control.hardware_profile import HardwareProfile
from engine.control.hierarchy import roof_points, turning_points
from engine.control.model_profile import ModelProfile
from engine.control.operators import Workload
from engine.control.policies import Outcome, moe_speq, on_demand, streamed
from engine.control.reproduction import moespeq, specmoeoff
from engine.control.routing import Routing
from engine.errors import BudgetError

#: How close a figure must come to count as reproduced.
CLOSE = 0.10


def simulate_policies(
    hardware: HardwareProfile, model: ModelProfile, work: Workload, routing: Routing, timeline: bool = False
) -> dict[str, Any]:
    """Every policy's iteration, and the roofline of its phases. A policy that does not fit says why.

    With `timeline`, each policy has its `spans` too: {"lane", "name", "start", "end", "work"}, in seconds.
    """
    runs: tuple[tuple[str, Callable[[], Outcome]], ...] = (
        ("on demand", lambda: on_demand(hardware, model, work, routing)),
        ("MoE-SpeQ", lambda: moe_speq(hardware, model, work, routing)),
        ("streamed, no draft", lambda: streamed(hardware, model, replace(work, k=0), routing)),
        ("SpecMoEOff", lambda: streamed(hardware, model, work, routing)),
    )
    points = roof_points(hardware, model, work, routing)
    by_phase = {point.phase: point for point in points}
    turning = None
    if hardware.gpu:
        turning = asdict(
            turning_points(hardware, by_phase["verify attention"].intensity, by_phase["experts"].intensity)
        )
    return {
        "hardware": hardware.label,
        "model": model.label,
        "workload": {**asdict(work), "tokens_per_round": work.tokens},
        "policies": [_policy(name, run, timeline) for name, run in runs],
        "roofline": [{**asdict(point), "utilisation": point.utilisation} for point in points],
        "turning_points": turning,
        "roofs": _roofs(hardware),
    }


def _roofs(hardware: HardwareProfile) -> list[dict[str, Any]]:
    """The ceilings over the roofline's points: TFLOP/s, or the GB/s that a FLOP/byte is multiplied with."""
    sides = {"gpu": hardware.gpu, "cpu": hardware.cpu}
    roofs: list[dict[str, Any]] = []
    for where, side in sides.items():
        if side is not None:
            roofs.append({"roof": f"{where} arithmetic", "tflops": side.tflops, "gbps": None})
            roofs.append({"roof": f"{where} memory", "tflops": None, "gbps": side.memory_gbps})
    return [*roofs, {"roof": f"the {hardware.slow_lane}", "tflops": None, "gbps": hardware.slow_gbps}]


def _policy(name: str, run: Callable[[], Outcome], timeline: bool) -> dict[str, Any]:
    keys = ("iteration_s", "target_s", "draft_s", "tokens", "tokens_per_second", "slots", "busy", "binds")
    try:
        found = run()
    except BudgetError as error:
        spans: dict[str, Any] = {"spans": []} if timeline else {}
        return {"policy": name, **dict.fromkeys(keys), "reason": f"does not fit: {error}", **spans}
    it = found.iteration
    values = (it.seconds, it.target, it.draft, found.tokens, found.tokens_per_second, found.slots, it.busy, it.binding)
    spans = {"spans": [asdict(span) for span in it.spans]} if timeline else {}
    return {"policy": name, **dict(zip(keys, values, strict=True)), "reason": it.reason, **spans}


def reproduce() -> dict[str, Any]:
    """`rows`, one a published figure, and how many of ours are within 10 % of it."""
    rows = [row.to_json() for row in (*specmoeoff.rows(), *moespeq.rows())]
    given = [row["error"] for row in rows if row["error"] is not None]
    counts = {
        "figures": len(rows),
        "given": len(given),
        "within_10_percent": sum(abs(error) <= CLOSE for error in given),
        "input_missing": len(rows) - len(given),
    }
    return {"rows": rows, "counts": counts}
