"""The file that `tune` writes and `generate --profile` reads: a JSON object with what was chosen, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from engine.config import CacheBudget, EngineConfig, GenerationConfig, LinkConfig
from engine.errors import UsageError

#: What the file calls itself, and the version of its layout.
KIND, VERSION = "specviz tune profile", 1


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the profile decides of a run. `cache_bytes` is the cache's budget; `micro_batches` of a pass."""

    model: str
    dtype: str
    link: LinkConfig
    draft: str
    k: int
    batch: int
    prefetch: str
    cache_bytes: int
    micro_batches: int = 1

    def __post_init__(self) -> None:
        # Both validate everything else.
        EngineConfig(self.model, self.dtype, self.draft, "lookahead", self.prefetch, self.cache, self.link)
        GenerationConfig(k=self.k, batch=self.batch)

    @property
    def cache(self) -> CacheBudget:
        return CacheBudget(nbytes=self.cache_bytes)

    def options(self) -> dict[str, Any]:
        """The command line's options that this is the default of."""
        names = ("model", "dtype", "link", "draft", "k", "batch", "prefetch", "cache")
        return {name: getattr(self, name) for name in names} | {"policy": "lookahead"}


def save_profile(path: Path, report: dict[str, Any]) -> None:
    """Write a report of `tune`. Raises UsageError when the file cannot be written."""
    try:
        path.write_text(json.dumps({"kind": KIND, "version": VERSION, **report}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the profile {path}: {error.strerror}") from error


def load_profile(path: Path) -> Chosen:
    """Raises UsageError with what is wrong with the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the profile {path}: {error}; write one with tune --out") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise UsageError(f"{path} is no profile of tune: write one with tune --out")
    if found.get("version") != VERSION:
        raise UsageError(f"{path} has version {found.get('version')!r}, not {VERSION}: write it again with tune --out")
    try:
        chosen = found["chosen"]
        return Chosen(**{**chosen, "link": LinkConfig(**chosen["link"])})
    except (TypeError, KeyError) as error:
        raise UsageError(f"the profile {path} is damaged ({error}): write it again with tune --out") from error
    except UsageError as error:
        raise UsageError(f"the profile {path} is damaged: {error}") from error
