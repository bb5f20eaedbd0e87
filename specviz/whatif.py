"""What a published model would do on a published machine: the simulator, asked by the page. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from engine.config import K_LIMIT
from engine.control.hardware_profile import HardwareProfile, load_hardware
from engine.control.model_profile import load_model
from engine.control.operators import Workload
from engine.control.policies import batch_that_fits
from engine.control.profile_files import profile_names
from engine.control.routing import UniformRouting
from engine.errors import EngineError, UsageError
from engine.simulate.reports import reproduce, simulate_policies

#: Setting → smallest, largest and default; memory in GiB, 0 for what the profile has.
LIMITS: dict[str, tuple[float, float, float]] = {
    "batch": (1, 4096, 1),
    "k": (0, K_LIMIT, 8),
    "acceptance": (0, 1, 0.95),
    "prompt": (1, 32768, 512),
    "output": (1, 8192, 128),
    "fast_gib": (0, 4096, 0),
    "host_gib": (0, 65536, 0),
}
WHOLE = ("batch", "k", "prompt", "output")
DEFAULTS = {"hardware": "a100-40gb", "model": "mixtral-8x7b"}
LARGEST = "max"


@cache
def choices() -> dict[str, Any]:
    """What can be asked: the profiles with their labels, and the limits of every setting."""
    hardware = [load_hardware(name) for name in profile_names("hardware")]
    models = [load_model(name) for name in profile_names("models")]
    return {
        "hardware": [
            {
                "name": machine.name,
                "label": machine.label,
                "fast_gib": machine.fast.memory_gib,
                "host_gib": machine.cpu.memory_gib if machine.gpu else None,
            }
            for machine in hardware
        ],
        "models": [
            {"name": model.name, "label": model.label, "experts_gib": model.experts_bytes / 2**30} for model in models
        ],
        "limits": {name: dict(zip(("min", "max", "default"), limits, strict=True)) for name, limits in LIMITS.items()},
        "defaults": DEFAULTS,
    }


def simulate(query: Mapping[str, str]) -> dict[str, Any]:
    """`simulate_policies` with timelines, for settings given as texts; batch may be "max". Raises UsageError.

    Spans are [lane, name, start, end, work], in seconds.
    """
    unknown = sorted(set(query) - set(LIMITS) - set(DEFAULTS))
    if unknown:
        raise UsageError(f"unknown setting {unknown[0]!r}: use one of {', '.join([*DEFAULTS, *LIMITS])}")
    hardware, model = (
        _profile("hardware", query, load_hardware),
        _profile("model", query, load_model),
    )
    largest = query.get("batch") == LARGEST
    values = {name: _number(name, query) for name in LIMITS if not (largest and name == "batch")}
    hardware = _with_memory(hardware, values["fast_gib"], values["host_gib"])
    work = Workload(1, int(values["k"]), int(values["prompt"]), int(values["output"]), values["acceptance"])
    work = replace(work, batch=batch_that_fits(hardware, model, work) if largest else int(values["batch"]))
    report = simulate_policies(hardware, model, work, UniformRouting(model.experts, model.top_k), timeline=True)
    for policy in report["policies"]:
        policy["spans"] = [list(span.values()) for span in policy["spans"]]
    return report


@cache
def papers() -> dict[str, Any]:
    """The papers' figures beside ours."""
    return reproduce()


def _profile(kind: str, query: Mapping[str, str], load: Callable[[str], Any]) -> Any:
    """A bundled profile; a page may not name files."""
    name = query.get(kind, DEFAULTS[kind])
    known = profile_names("models" if kind == "model" else kind)
    if name not in known:
        raise UsageError(f"unknown {kind} {name!r}: use one of {', '.join(known)}")
    return load(name)


def _number(name: str, query: Mapping[str, str]) -> float:
    low, high, default = LIMITS[name]
    text = query.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise UsageError(f"{name} {text!r} is not a number: use {low:g} to {high:g}") from None
    if not low <= value <= high or (name in WHOLE and value != int(value)):
        raise UsageError(
            f"{name} {value:g} is out of range: use {'whole numbers from ' * (name in WHOLE)}{low:g} to {high:g}"
        )
    return value


def _with_memory(hardware: HardwareProfile, fast_gib: float, host_gib: float) -> HardwareProfile:
    """The machine with other memories; without a GPU, fast memory is the CPU's."""
    if fast_gib:
        side = "gpu" if hardware.gpu else "cpu"
        hardware = replace(hardware, **{side: replace(hardware.fast, memory_gib=fast_gib)})  # type: ignore[arg-type]
    if host_gib and hardware.gpu:
        hardware = replace(hardware, cpu=replace(hardware.cpu, memory_gib=host_gib))
    return hardware


def answer(part: str, query: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON object for choices, simulate (settings as the query) or papers; {"error"} if refused."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "choices": choices,
        "simulate": lambda: simulate(query),
        "papers": papers,
    }
    if part not in parts:
        return 404, {"error": f"use one of {', '.join(parts)}"}
    try:
        return 200, parts[part]()
    except EngineError as error:
        return 400, {"error": str(error)}


def whatif_routes() -> list[BaseRoute]:
    """GET /specviz/whatif/PART answers with JSON."""

    async def endpoint(request: Request) -> Response:
        status, body = await run_in_threadpool(answer, request.path_params["part"], request.query_params)
        return JSONResponse(body, status)

    return [Route("/specviz/whatif/{part}", endpoint)]
