"""How fast this machine reads memory: what every kernel is held against."""

from __future__ import annotations

import ctypes
import time

import torch

from engine.kernels.native import Native
from engine.kernels.pages import copies
from engine.machine import available_bytes, last_level_bytes

#: One set of weights stays below this, and below a share of what is free: a job holds up to three of them.
MOST_STREAM_BYTES, STREAM_SHARE = 1792 << 20, 0.15


def stream_bytes() -> int:
    """How much memory a measurement must walk over so that it finds nothing of it in any cache."""
    wanted = max(4 * last_level_bytes(), 512 << 20)
    return min(wanted, MOST_STREAM_BYTES, int(available_bytes() * STREAM_SHARE))


def give_memory_back() -> None:
    """Return freed memory to the system, where its allocator would keep it: a bench has many large short lives."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Roof:
    """GB/s at which all threads of the kernels read memory and do nothing else.

    `streamed` is the best seen so far, over `nbytes` of memory: ask for it when all is done.
    """

    def __init__(self, native: Native, nbytes: int) -> None:
        self._read = native.library.specviz_read
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._read.restype = ctypes.c_uint64
        self._memory = copies(torch.tensor(1, dtype=torch.uint8), nbytes)
        self.streamed = 0.0

    def sample(self, passes: int = 3) -> None:
        """Read the whole memory a few times more."""
        self.streamed = max(self.streamed, *(self._pass([self._memory], 1) for _ in range(passes)))

    def resident(self, tensors: list[torch.Tensor], passes: int = 9) -> float:
        """GB/s of reading just these contiguous tensors over and over."""
        repeats = max(1, (64 << 20) // sum(tensor.nbytes for tensor in tensors))
        return max(self._pass(tensors, repeats) for _ in range(passes))

    def _pass(self, tensors: list[torch.Tensor], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            for tensor in tensors:
                self._read(tensor.data_ptr(), tensor.nbytes)
        return repeats * sum(tensor.nbytes for tensor in tensors) / (time.perf_counter() - start) / 1e9
