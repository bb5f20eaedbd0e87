"""Rivals that do the same job, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Carousel(Generic[T]):
    """Equal pieces of memory, used one after the other: once round, and no cache remembers the first."""

    def __init__(self, pieces: list[T]) -> None:
        self._pieces = pieces
        self._at = 0

    def next(self) -> T:
        """The piece whose turn it is."""
        piece = self._pieces[self._at]
        self._at = (self._at + 1) % len(self._pieces)
        return piece


@dataclass(frozen=True)
class Rival:
    """One way to do a job. `call` does it once, on the next piece, and reads `nbytes` of weights or KV.

    `ours` tells the kernels apart. `bound` marks what is shown for comparison and never is the base: it needs
    the weights in another form than the one in which they arrive.
    """

    name: str
    call: Callable[[], torch.Tensor]
    nbytes: int
    ours: bool = False
    bound: bool = False


@dataclass(frozen=True)
class Bar:
    """What an issue asks of our rival: at least `ratio` times the base, or at least `share` of the roof."""

    ratio: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Job:
    """Something to compute, and those who can. `state` says where the memory is: streamed or cache-resident.

    `base` names the rival that ratios are taken to; None is the fastest of the others. `memory` are the tensors
    of a cache-resident job, for its own roof.
    """

    name: str
    state: str
    rivals: list[Rival]
    bars: list[Bar]
    base: str | None = None
    memory: list[torch.Tensor] = field(default_factory=list)


def best_seconds(rivals: list[Rival], repeats: int, window_s: float) -> list[float]:
    """Seconds a call of each, the best of `repeats` windows, in which the rivals take turns.

    Taking turns, so that a disturbance of the machine hits all of them; the best, because it hits upwards only.
    A window is as many calls as its rival's best so far says: a first call that was disturbed is forgotten.
    """
    best = [_seconds(rival, 1) for rival in rivals]
    for _ in range(repeats):
        for i, rival in enumerate(rivals):
            best[i] = min(best[i], _seconds(rival, max(1, round(window_s / max(best[i], 1e-7)))))
    return best


def _seconds(rival: Rival, count: int) -> float:
    rival.call()  # wakes the threads up, and puts the others' to sleep
    start = time.perf_counter()
    for _ in range(count):
        rival.call()
    return (time.perf_counter() - start) / count


def largest_difference(job: Job) -> float:
    """How far the rivals' results lie apart, as a share of the largest number in them."""
    first, *others = (rival.call().float() for rival in job.rivals)
    return max((float((other - first).abs().max() / first.abs().max()) for other in others), default=0.0)
