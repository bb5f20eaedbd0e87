"""What the system tells of the machine: its caches, its free memory, who else uses it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Where the system does not tell.
USUAL_LAST_LEVEL = 32 << 20
_PROC_STAT = Path("/proc/stat")


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


class Neighbours:
    """How busy other programs keep the processor, from its creation on.

    Timings suffer from them, and not evenly: threads that wait for each other (torch's) suffer the most.
    """

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float | None:
        """The cores that others used, of all; None where the system does not tell."""
        (start, busy, own), (now, busy_now, own_now) = self._start, self._now()
        if busy is None or busy_now is None or now <= start:
            return None
        return max(0.0, (busy_now - busy) - (own_now - own)) / (now - start) / (os.cpu_count() or 1)

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        """(clock, seconds that all cores worked for anybody, or were taken away; and for this process)."""
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        try:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(
                int, _PROC_STAT.read_text().split("\n")[0].split()[1:]
            )
        except (OSError, ValueError):
            return time.monotonic(), None, own
        return time.monotonic(), (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), own
