"""What the simulation of one iteration tells, whatever the policy."""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.simulator import Span

#: From this share on a lane is what the iteration waits for.
BINDS = 0.9

WORK = {
    "gpu": "the GPU computes",
    "cpu": "the CPU computes",
    "link": "the link moves experts",
    "disk": "the disk reads experts",
}

#: How one expert, or a page of a layer's experts, reaches fast memory: lane and seconds of each hop in turn.
Hops = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Iteration:
    """`seconds` of one round: `target` of them until the target's pass was done, `draft` for drafting.

    `busy` is the share of the iteration in which each lane worked; `spans` is what it worked on, and when.
    """

    seconds: float
    target: float
    draft: float
    busy: dict[str, float]
    spans: tuple[Span, ...] = ()

    @property
    def binding(self) -> str:
        """The lane that worked most."""
        return max(self.busy, key=lambda lane: self.busy[lane])

    @property
    def reason(self) -> str:
        """Which resource binds, in words."""
        lane = self.binding
        share = self.busy[lane]
        if share >= BINDS:
            return f"{lane}: {WORK[lane]} {share:.0%} of the time"
        return f"nothing alone: {lane} is busiest at {share:.0%}, the rest is waiting for each other"
