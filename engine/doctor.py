"""What this machine and installation can do: `python -m engine doctor`."""

from __future__ import annotations

import math
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import EngineConfig, cache_directory, draft_model_id
from engine.errors import UsageError
from engine.kernels.build import BuildError, compiler
from engine.kernels.native import VARIABLE, Absent, native
from engine.kernels.pages import PAGE, allocate
from engine.machine import available_bytes, caches
from engine.model.checkpoint import Checkpoint, resolve_directory
from engine.model.skeleton import survey
from engine.offload.host import pin, unpin
from engine.offload.quantize import quantized_nbytes
from engine.offload.slots import slot_nbytes
from engine.report import machine_info
from engine.speculation.drafters import self_draft_bits


def examine(config: EngineConfig | None = None) -> dict[str, Any]:
    """Everything as plain JSON; with a configuration, the memory that an engine of it would hold, too.

    Builds the kernels if they are not there yet. Raises UsageError as `native` does, and for a configuration
    ModelError and CheckpointError.
    """
    machine = machine_info()
    report = {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": {
            "cpu": machine["cpu"],
            "cores": machine["cores"],
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine["cores"],
            "caches": caches(),
            "memory_gib": machine["memory_gib"],
            "available_gib": round(available_bytes() / 2**30, 1),
            "torch_threads": machine["threads"],
        },
        "cuda": _cuda(),
        "kernels": _kernels(),
        "cache": _cache(cache_directory()),
    }
    return report if config is None else report | {"model": fast_memory(config)}


def fast_memory(config: EngineConfig) -> dict[str, Any]:
    """The split of fast memory in bytes, from the checkpoint's headers. KV grows with the text and comes on top."""
    directory = resolve_directory(config.model)
    dtype = getattr(torch, config.dtype)
    table, shared = survey(directory, dtype)
    shape, bits = table.shape, self_draft_bits(config.draft)
    sizes = table.experts, table.layers, shape.numel * dtype.itemsize
    slots, extra = config.cache.slots_per_layer(*sizes), config.cache.extra_slots(*sizes)
    matrices = (shape.gate_up, shape.down)
    copied = sum(quantized_nbytes(matrix, bits) for matrix in matrices) if bits is not None else 0
    small = draft_model_id(config.draft)
    memory = {
        "shared": shared,
        "draft": table.layers * table.experts * copied + (_weights(small, dtype) if small is not None else 0),
        "cache": (table.layers * slots + extra) * slot_nbytes(shape, dtype),
    }
    return {
        "name": directory.resolve().name,
        "moe_layers": table.layers,
        "experts": table.experts,
        "dtype": config.dtype,
        "slots_per_layer": slots,
        "expert_bytes": shape.nbytes,
        "all_experts_bytes": table.layers * table.experts * shape.numel * dtype.itemsize,
        "memory": memory | {"total": sum(memory.values())},
    }


def _weights(model: str, dtype: torch.dtype) -> int:
    """Bytes of all weights of a draft model in `dtype`, from its checkpoint's headers. Its KV comes on top, too."""
    tensors = Checkpoint.open(resolve_directory(model)).tensors
    return sum(math.prod(info.shape) for info in tensors.values()) * dtype.itemsize


def _cuda() -> dict[str, Any]:
    """CUDA devices with their memory, and whether main memory can be pinned for them: null, or why not."""
    if not torch.cuda.is_available():
        return {"devices": [], "pinning_refused": None}
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    page = allocate((PAGE,), torch.uint8)
    refused = pin(page)
    if refused is None:
        unpin(page)
    return {"devices": [{"name": d.name, "bytes": d.total_memory} for d in found], "pinning_refused": refused}


def _kernels() -> dict[str, Any]:
    """`variant` is the one in use; null, with `reason`, where torch computes."""
    try:
        cxx = compiler()
    except BuildError:
        cxx = None
    setting = {"compiler": cxx, "setting": os.environ.get(VARIABLE) or "auto"}
    found = native()
    if isinstance(found, Absent):
        return {**setting, "variant": None, "reason": found.reason, "compiled": [], "supported": [], "library": None}
    return {
        **setting,
        "variant": found.variant,
        "reason": None,
        "compiled": list(found.compiled),
        "supported": list(found.variants),
        "library": found.path,
    }


def _cache(directory: Path) -> dict[str, Any]:
    """Where packs and kernels go, what they take, and what is free on that disk."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
        used = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    except OSError as error:
        raise UsageError(f"cannot look into {directory}: {error.strerror}") from error
    return {
        "directory": str(directory),
        "exists": directory.is_dir(),
        "writable": os.access(there, os.W_OK),
        "used_bytes": used,
        "free_bytes": free,
    }


def format_doctor(report: dict[str, Any]) -> str:
    """The report as text, for a terminal."""
    machine, kernels, cache = report["machine"], report["kernels"], report["cache"]
    levels = ", ".join(f"L{level['level']} {_size(level['bytes'])}" for level in machine["caches"])
    if kernels["variant"]:
        others = [name for name in kernels["compiled"] if name not in kernels["supported"]]
        state = f"{kernels['variant']}, of {', '.join(kernels['supported'])}"
        state += f"; compiled but not for this machine: {', '.join(others)}" if others else ""
    else:
        state = f"none, torch computes instead (slower, same text): {kernels['reason']}"
    lines = {
        "python": report["versions"]["python"],
        "torch": f"{report['versions']['torch']}, {machine['torch_threads']} threads",
        "transformers": report["versions"]["transformers"],
        "cpu": f"{machine['cpu']}, {machine['usable_cores']} of {machine['cores']} cores usable",
        "caches": levels or "unknown",
        "memory": f"{machine['memory_gib']} GiB, {machine['available_gib']} GiB available",
        "cuda": _cuda_line(report["cuda"]),
        "kernels": state,
        "library": kernels["library"] or "–",
        "compiler": kernels["compiler"] or "none: install g++ (apt-get install g++)",
        "setting": f"{VARIABLE}={kernels['setting']}",
        "cache": f"{cache['directory']}, {_size(cache['used_bytes'])} used, {_size(cache['free_bytes'])} free"
        + ("" if cache["writable"] else "; NOT writable"),
    }
    if model := report.get("model"):
        memory = model["memory"]
        lines["model"] = (
            f"{model['name']}, {model['moe_layers']} layers × {model['experts']} experts of "
            f"{_size(model['expert_bytes'])} on disk, {model['slots_per_layer']} slots a layer, {model['dtype']}"
        )
        split = ", ".join(f"{part} {_size(memory[part])}" for part in ("shared", "draft", "cache"))
        lines["fast memory"] = f"{_size(memory['total'])} and the KV cache: {split}"
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines.items())


def _cuda_line(cuda: dict[str, Any]) -> str:
    if not cuda["devices"]:
        return "no device: --link host copies within main memory, which shows the mechanism and saves nothing"
    names = ", ".join(f"{device['name']} with {_size(device['bytes'])}" for device in cuda["devices"])
    refused = cuda["pinning_refused"]
    return (
        f"{names}; main memory can be pinned" if refused is None else f"{names}; main memory stays pageable: {refused}"
    )


def _size(nbytes: int) -> str:
    """Binary units, as caches are told in."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / 2**shift:.4g} {unit}"
    return f"{nbytes / 1024:.4g} KiB"
