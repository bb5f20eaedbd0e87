"""One expert on its way over a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.offload.streams import Fence

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
ENDED = (DONE, FAILED, CANCELLED)


@dataclass(eq=False)
class Transfer:
    """A request to move one expert into `destination`; its link owns all fields, others only read them.

    Times are `time.perf_counter_ns()`. `cause` is "demand" or "prefetch" as issued: `urgent` is what promotion
    changes. `deadline` orders prefetches (any unit, earliest first). `bytes_moved` counts stored bytes that
    landed. `error` is set when `state` is "failed". `abandoned`: a stuck read may still write to `destination`,
    which must never be used again.
    """

    id: int
    layer: int
    expert: int
    cause: str
    deadline: int
    destination: torch.Tensor
    nbytes: int
    queued_ns: int
    on_done: Callable[[Transfer], None] | None = None
    start_ns: int = 0
    end_ns: int = 0
    #: When it was overtaken: [start, end] in ns, and until when its last chunk lasted.
    pauses: list[list[int]] = field(default_factory=list)
    moved_until_ns: int = 0
    bytes_moved: int = 0
    state: str = QUEUED
    error: Exception | None = None
    abandoned: bool = False
    urgent: bool = False
    #: Stored bytes handed to workers so far, and how many of those chunks have not landed yet.
    issued: int = 0
    in_flight: int = 0
    #: How it must end once no chunk is in flight any more: "" while nobody has stopped it.
    ending: str = ""
    #: Latency that an emulated link has still to wait for before the first byte.
    latency_ns: int = 0
    #: What the device was asked to compute before, which may still read the destination.
    fence: Fence | None = None
    #: Set after `on_done` has returned.
    finished: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """What the link serves first: demands as they came, then prefetches by deadline."""
        return (0, 0, self.id) if self.urgent else (1, self.deadline, self.id)


@dataclass(frozen=True)
class Chunk:
    """Stored bytes `offset` to `offset + nbytes` of a transfer, moved by one worker without a break.

    An emulated link lands it no earlier than `due_ns`; while it waits for latency, `nbytes` is 0.
    """

    transfer: Transfer
    offset: int
    nbytes: int
    due_ns: int = 0
