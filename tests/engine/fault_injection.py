"""Faults that strike at the n-th call, and what must be true of an engine whatever struck it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from engine.engine import Engine

#: Threads and descriptors go a moment after the call that ended them.
PATIENCE_S = 5.0


class NthCall:
    """Stands for `function`, and runs `fault()` before the n-th call (from 0; None: before none).

    A fault that returns lets the call through. Safe to use from several threads; counts its calls.
    """

    def __init__(self, function: Callable[..., Any], n: int | None, fault: Callable[[], object]) -> None:
        self._function, self._n, self._fault = function, n, fault
        self._lock = threading.Lock()
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            strikes, self.calls = self.calls == self._n, self.calls + 1
        if strikes:
            self._fault()
        return self._function(*args, **kwargs)

    @property
    def struck(self) -> bool:
        return self._n is not None and self.calls > self._n


def raising(error: BaseException) -> Callable[[], None]:
    """A fault that raises `error`."""

    def fault() -> None:
        raise error

    return fault


def descriptors() -> dict[str, str]:
    """What each open file descriptor of this process refers to; empty where nobody tells."""
    targets = {}
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        # The listing's own is closed by now, and others may be.
        with suppress(OSError):
            targets[number] = os.readlink(f"/proc/self/fd/{number}")
    return targets


def tensors() -> int:
    """Tensors that are alive."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@contextmanager
def nothing_left() -> Iterator[None]:
    """After the block there are as many threads and open files as before it."""
    threads, files = threading.active_count(), descriptors()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (threading.active_count(), descriptors()) != (threads, files) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() == threads, [thread.name for thread in threading.enumerate()]
    assert descriptors() == files, "a file was left open (or closed that was open before)"


def check_idle(engine: Engine) -> None:
    """No slot is leased or on its way, none is in excess, and the link has nothing to do."""
    cache, link = engine.cache, engine.loaded.link
    assert cache.pool.waiter is None and not cache.pool.prefetching and cache.pool.plan is None
    assert cache.nbytes <= cache.capacity_nbytes
    for shelf in cache.pool.shelves:
        assert not [slot for slot in shelf.slots if slot.pinned or slot.late or slot.transfer is not None]
        owned = {slot.expert: slot for slot in shelf.slots if slot.expert is not None}
        assert owned == shelf.by_expert
    assert not link._active
    assert not any(worker.chunk for worker in link._workers)
