"""What this machine and installation can do: `python -m engine doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.config import cache_directory
from engine.errors import UsageError
from engine.kernels.build import BuildError, compiler
from engine.kernels.native import VARIABLE, Absent, native
from engine.machine import available_bytes, caches
from engine.report import machine_info


def examine() -> dict[str, Any]:
    """Everything as plain JSON. Builds the kernels if they are not there yet. Raises UsageError as `native` does."""
    machine = machine_info()
    return {
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
        "kernels": _kernels(),
        "cache": _cache(cache_directory()),
    }


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
        "kernels": state,
        "library": kernels["library"] or "–",
        "compiler": kernels["compiler"] or "none: install g++ (apt-get install g++)",
        "setting": f"{VARIABLE}={kernels['setting']}",
        "cache": f"{cache['directory']}, {_size(cache['used_bytes'])} used, {_size(cache['free_bytes'])} free"
        + ("" if cache["writable"] else "; NOT writable"),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines.items())


def _size(nbytes: int) -> str:
    """Binary units, as caches are told in."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / 2**shift:.4g} {unit}"
    return f"{nbytes / 1024:.4g} KiB"
