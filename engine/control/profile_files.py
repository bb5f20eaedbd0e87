"""Profiles are JSON files whose every figure names its source; what is unknown, missing or unsourced is refused."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import UsageError

PROFILES = Path(__file__).resolve().parent.parent.parent / "assets" / "profiles"

#: Words about a profile, which need no source.
WORDS = ("label", "sources", "note")

Part = TypeVar("Part")


def profile_names(kind: str) -> list[str]:
    """Names of the profiles of that kind: hardware or models."""
    return sorted(path.stem for path in (PROFILES / kind).glob("*.json"))


def read_profile(kind: str, name: str) -> dict[str, Any]:
    """The JSON object of a profile that comes with the project, or of a file of your own (a path to a .json).

    Raises UsageError with the known names, or with what is wrong with the file.
    """
    path = Path(name) if name.endswith(".json") else PROFILES / kind / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(profile_names(kind))
        raise UsageError(f"no profile {name!r} among {kind}: use one of {known}, or a .json file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the profile {path}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"the profile {path} must be one JSON object")
    return found


def build_part(kind: type[Part], found: Any, where: str) -> Part:
    """A dataclass from a JSON object. Raises UsageError for unknown or missing keys."""
    if not isinstance(found, dict):
        raise UsageError(f"{where} must be an object with {', '.join(f.name for f in fields(kind))}")  # type: ignore[arg-type]
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise UsageError(f"{where} has an unknown key {unknown[0]!r}: use {', '.join(known)}")
    missing = [name for name, field in known.items() if name not in found and field.default is MISSING]
    if missing:
        raise UsageError(f"{where} lacks {missing[0]!r}")
    return kind(**found)


def check_sources(found: dict[str, Any], where: str) -> None:
    """Every figure must be named under exactly one source. Raises UsageError with the first that is not.

    `sources` maps a source to the figures it gives; "gpu" stands for all figures of that part, "gpu.tflops" for one.
    """
    sources = found.get("sources")
    if not isinstance(sources, dict) or not all(isinstance(names, list) for names in sources.values()):
        raise UsageError(f"{where} needs sources: an object from each source to a list of the figures it gives")
    figures = set()
    for key, value in found.items():
        if key in WORDS or value is None:
            continue
        figures |= {f"{key}.{part}" for part in value if part != "kind"} if isinstance(value, dict) else {key}
    named: list[str] = []
    for name in (name for names in sources.values() for name in names):
        inside = [figure for figure in figures if figure == name or figure.startswith(f"{name}.")]
        if not inside:
            raise UsageError(f"{where}: a source names {name!r}, which is no figure of it")
        named += inside
    unsourced = sorted(figure for figure in figures if named.count(figure) != 1)
    if unsourced:
        raise UsageError(f"{where}: {unsourced[0]!r} needs one source, and has {named.count(unsourced[0])}")


def check_positive(where: str, **figures: float) -> None:
    """Raises UsageError for a figure that is not a number above zero."""
    for name, value in figures.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise UsageError(f"{where}: {name} must be a number above 0, not {value!r}")
