"""What the system tells of the machine: its caches, its free memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Where the system does not tell.
USUAL_LAST_LEVEL = 32 << 20


def caches(directory: Path = CACHES) -> list[dict[str, int]]:
    """The first core's data caches, innermost first: `level`, `bytes`."""
    found = []
    for index in sorted(directory.glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and (match := re.fullmatch(r"(\d+)([KMG]?)", size)):
            found.append({"level": int(level), "bytes": int(match[1]) << 10 * " KMG".index(match[2] or " ")})
    return found


def last_level_bytes(directory: Path = CACHES) -> int:
    """Bytes of the last-level cache."""
    return max((cache["bytes"] for cache in caches(directory)), default=USUAL_LAST_LEVEL)


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    try:
        text = Path("/proc/meminfo").read_text()
        return int(re.search(r"MemAvailable:\s+(\d+) kB", text)[1]) << 10  # type: ignore[index]
    except (OSError, TypeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
