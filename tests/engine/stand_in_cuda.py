"""A CUDA device that is not there: its tensors lie in main memory and behave as if they did not.

They refuse to be computed with together with tensors of main memory, as those of a real device do. So an engine that
runs on it has put every tensor where it belongs, and has driven streams, events and pinned memory as it would drive
real ones. What it cannot show is speed, and that copies and kernels keep the order that the fences ask for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)

_aten = torch.ops.aten
#: What takes tensors of both: copies, and indexing, which takes its indices from anywhere.
_CROSSING = (_aten._to_copy.default, _aten.copy_.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default)


class Away(torch.Tensor):
    """A tensor on `DEVICE`, as Python sees it; `inner` holds what it is.

    For torch's C++ it lies in main memory: there is no CUDA in a build for the CPU that could be asked about it.
    """

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Away:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE

    def to(self, *args: Any, **options: Any) -> torch.Tensor:
        copy = options.pop("copy", False)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **options)
        if not copy and device in (None, DEVICE) and dtype in (None, self.dtype):
            return self
        moved = self.inner.to(dtype or self.dtype, copy=device is not None and device != DEVICE)
        return Away(moved) if device in (None, DEVICE) else moved

    def cpu(self) -> torch.Tensor:
        return self.inner.clone()

    def new_tensor(self, data: Any) -> Away:
        return Away(self.inner.new_tensor(data))

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self) -> Any:
        raise TypeError("this tensor is on another device")

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """While it is entered, this thread can make tensors on `DEVICE`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    goes_away = any(isinstance(tensor, Away) for tensor in tensors)
    if goes_away and func not in _CROSSING:
        judged = [args[0], *args[2:3]] if func in _INDEXING else tensors
        here = [tensor for tensor in judged if not isinstance(tensor, Away) and tensor.dim()]
        assert not here, f"{func} got tensors of two devices"
    if kwargs.get("device") is not None:
        goes_away = torch.device(kwargs["device"]) == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")} if goes_away else kwargs
    result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func._schema.is_mutable and isinstance(result, torch.Tensor):
        return args[0]  # in place
    return (
        tree_map(lambda value: Away(value) if isinstance(value, torch.Tensor) else value, result)
        if goes_away
        else result
    )


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Away) else value


class Runtime:
    """What the engine asked of the device, in order: `log`. `pinned` maps addresses to bytes; `refuse` denies them."""

    def __init__(self, refuse: int = 0) -> None:
        self.log: list[tuple[str, object]] = []
        self.pinned: dict[int, int] = {}
        self.refuse = refuse

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuse:
            self.pinned[address] = nbytes
        return self.refuse

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


class _Stream:
    runtime: Runtime

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE

    def wait_event(self, event: _Event) -> None:
        self.runtime.log.append(("wait", event))

    def synchronize(self) -> None:
        self.runtime.log.append(("end", None))


class _Event:
    runtime: Runtime

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._ns = 0
        self._timed = enable_timing
        self.thread = threading.current_thread().name

    def record(self, stream: object = None) -> None:
        self._ns = time.perf_counter_ns()
        self.runtime.log.append(("record", self))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self._ns, "an event that was never recorded"

    def elapsed_time(self, end: _Event) -> float:
        assert self._timed and end._timed and end._ns >= self._ns > 0
        return (end._ns - self._ns) / 1e6


@contextmanager
def stand_in_cuda(monkeypatch: pytest.MonkeyPatch, refuse: int = 0) -> Iterator[Runtime]:
    """A machine with one CUDA device, for this thread and those that copy for it. `refuse`: what pinning returns."""
    if torch.cuda.is_available():
        pytest.skip("there is a real CUDA device")
    runtime = Runtime(refuse)
    with monkeypatch.context() as patch:
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda device: "stand-in",
            "get_device_properties": lambda index: SimpleNamespace(name="stand-in", total_memory=16 << 30),
            "_lazy_init": lambda: None,
            "cudart": lambda: runtime,
            "Stream": type("Stream", (_Stream,), {"runtime": runtime}),
            "Event": type("Event", (_Event,), {"runtime": runtime}),
            "stream": lambda stream: nullcontext(),
            "device": lambda device: nullcontext(),
        }.items():
            patch.setattr(torch.cuda, name, value)
        with _Mode():
            yield runtime
