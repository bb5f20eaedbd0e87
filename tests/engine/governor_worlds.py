"""Machines that exist as formulas only, for the governor: what is best on them is known without measuring."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.control.governor import Choice, Governor
from engine.control.observation import Arm, Memory, Observation

K_MAX, EXPERTS, TOP_K, LAYERS = 16, 16, 2, 8
#: Seconds for which something else takes the processor.
HICCUP = 0.01


@dataclass(frozen=True)
class World:
    """Costs in seconds. `accept`: chance that a draft token is right; `slots` a layer are resident.

    `hidden`: the share of compute under which a prefetch really proceeds; `waste`: prefetches that are not used, as
    a share of the useful ones; `contention`: how much slower compute is while prefetching. `noise` disturbs each
    measurement; `hiccups` of HICCUP seconds come at random, so many a second; `speed` of the processor multiplies
    compute.
    """

    accept: float = 0.8
    draft: float = 1e-3
    verify: float = 4e-3
    row: float = 0.2e-3
    transfer: float = 0.3e-3
    slots: int = 8
    overhead: float = 0.2e-3
    hidden: float = 1.0
    waste: float = 0.0
    contention: float = 0.0
    noise: float = 0.1
    hiccups: float = 0.0
    speed: float = 1.0

    @property
    def memory(self) -> Memory:
        return Memory(self.transfer, self.slots * LAYERS)

    def wanted(self, rows: int) -> float:
        """Distinct experts of independent rows (MoESD, equation 8)."""
        return LAYERS * EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows)

    def missing(self, rows: int) -> float:
        return self.wanted(rows) * (1 - self.slots / EXPERTS)

    def costs(self, arm: Arm) -> tuple[float, float, float]:
        """(draft, verify, stall)."""
        slower = self.speed * (1 + self.contention * arm.prefetch)
        draft = arm.k * self.draft * slower
        verify = (self.verify + self.row * (arm.k + 1)) * slower
        missing = self.missing(arm.k + 1)
        early = 0.0
        if arm.prefetch:  # the last row's routes come with the verification
            early = min(self.missing(arm.k), self.slots * LAYERS - (self.wanted(arm.k) - self.missing(arm.k)))
        hidden = self.hidden * (draft + verify)
        stall = max(early * (1 + self.waste) * self.transfer - hidden, 0.0) + (missing - early) * self.transfer
        return draft, verify, stall

    def seconds(self, arm: Arm) -> float:
        return sum(self.costs(arm)) + self.overhead * self.speed

    def tokens(self, k: int) -> float:
        """Leviathan et al., equation 1, as a sum."""
        return sum(self.accept**i for i in range(k + 1))

    def rate(self, arm: Arm) -> float:
        """Expected tokens/s of always choosing `arm`."""
        return self.tokens(arm.k) / self.seconds(arm)

    @property
    def best(self) -> Arm:
        arms = [Arm(k, prefetch) for k in range(K_MAX + 1) for prefetch in (False, True) if k or not prefetch]
        return max(arms, key=self.rate)

    def play(self, arm: Arm, draw: random.Random) -> Observation:
        """One round, as it is measured."""
        costs = [cost * draw.lognormvariate(0, self.noise) for cost in self.costs(arm)]
        left = sum(costs)
        while self.hiccups and (left := left - draw.expovariate(self.hiccups)) > 0:
            costs[draw.choice((0, 1)) if arm.k else 1] += HICCUP
        draft, verify, stall = costs
        accepted = 0
        while accepted < arm.k and draw.random() < self.accept:
            accepted += 1

        def counted(curve: Callable[[int], float]) -> list[int]:
            return [math.floor(curve(rows) + draw.random()) for rows in range(1, arm.k + 2)]

        return Observation(
            k=arm.k,
            prefetch=arm.prefetch,
            draft_seconds=draft,
            verify_seconds=verify,
            stall_seconds=stall,
            seconds=draft + verify + stall + self.overhead * self.speed,
            tokens=accepted + 1,
            lengths=[(min(accepted + 1, arm.k), accepted)],
            wanted=counted(self.wanted),
            misses=counted(self.missing),
        )


@dataclass
class Played:
    """The choices of a governor round by round, and the world of each round."""

    choices: list[Choice] = field(default_factory=list)
    rounds: list[Observation] = field(default_factory=list)
    worlds: list[World] = field(default_factory=list)

    def arms(self, start: int = 0, stop: int | None = None) -> list[Arm]:
        return [Arm(choice.k, choice.prefetch) for choice in self.choices[start:stop]]

    def share(self, k: int, start: int = 100, stop: int | None = None) -> float:
        ks = [choice.k for choice in self.choices[start:stop]]
        return ks.count(k) / len(ks)

    def efficiency(self, reference: Callable[[World], Arm], start: int = 0, stop: int | None = None) -> float:
        """Tokens a second over those that `reference` of each round's world would have brought, all expected ones.

        Expected ones, so that luck does not count: what is left of 1 is what choosing badly, and probing, cost.
        """
        tokens = spent = needed = 0.0
        for arm, world in zip(self.arms(start, stop), self.worlds[start:stop], strict=True):
            tokens += world.tokens(arm.k)
            spent += world.seconds(arm)
            needed += world.tokens(arm.k) / world.rate(reference(world))
        return needed / spent


def play(
    world: World | Callable[[int], World],
    seed: int = 0,
    k: int | str = "auto",
    prefetch: str = "auto",
    rounds: int = 400,
    k_max: int = K_MAX,
) -> Played:
    """A governor that knows nothing drives `world`, which may change with the round."""
    draw, governor, played = random.Random(seed), Governor(K_MAX, EXPERTS, TOP_K), Played()
    for number in range(rounds):
        now = world(number) if callable(world) else world
        choice = governor.choose(k, k_max, prefetch, now.memory, True)
        seen = now.play(Arm(choice.k, choice.prefetch), draw)
        governor.observe(seen, now.memory)
        played.choices.append(choice)
        played.rounds.append(seen)
        played.worlds.append(now)
    return played


def drawn(seed: int) -> World:
    """One of many kinds of machine."""
    draw = random.Random(seed)
    return World(
        accept=draw.choice((0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 1.0)),
        draft=draw.choice((0.2e-3, 1e-3, 4e-3)),
        row=draw.choice((0.0, 0.2e-3, 1e-3)),
        transfer=draw.choice((0.02e-3, 0.2e-3, 2e-3)),
        slots=draw.choice((3, 4, 8, 12)),
        hidden=draw.choice((0.2, 0.6, 1.0)),
        waste=draw.choice((0.0, 0.3)),
        contention=draw.choice((0.0, 0.4)),
        noise=0.05,
    )


def disturbed(world: World) -> World:
    """`world` on a processor that has others to serve."""
    return replace(world, noise=0.15, hiccups=10.0)


def wandering(world: World, seed: int, step: float = 0.02) -> Callable[[int], World]:
    """`world` on a processor whose speed wanders between half and twice its own."""
    draw, speeds = random.Random(seed), [1.0]
    while len(speeds) < 2000:
        speeds.append(min(max(speeds[-1] * draw.lognormvariate(0, step), 0.5), 2.0))
    return lambda number: replace(world, speed=speeds[number])
