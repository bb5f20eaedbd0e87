"""What this machine does at best, measured in a moment: the roofs over the phases of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

#: Read often enough for its best time; larger than most caches, small enough for any machine.
READ_BYTES = 128 << 20
#: Rows and columns of a product large enough to be limited by arithmetic alone.
SIZE = 1024
REPEATS = 4


@cache
def measure_roofs(dtype: str, device: str, threads: int) -> dict[str, float]:
    """`memory_gbps` of reading READ_BYTES and `tflops` of a dense product in `dtype`, the best of a few each.

    Takes some tenths of a second, once for each device and number of `threads` (those that torch has now).
    """
    where = torch.device(device)
    memory = torch.ones(READ_BYTES // 4, device=where)
    one = torch.ones(SIZE, SIZE, dtype=getattr(torch, dtype), device=where)
    return {
        "memory_gbps": READ_BYTES / _seconds(memory.sum) / 1e9,
        "tflops": 2 * SIZE**3 / _seconds(lambda: one @ one) / 1e12,
        "read_bytes": READ_BYTES,
    }


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """The best time of `work`, after it ran once to warm up."""
    best = float("inf")
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        work().reshape(-1)[0].item()  # a value is there only when the device is done
        best = min(best, time.perf_counter() - start)
    return best
