"""A against B: the same request with two sets of settings, and how both come to the same memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import KNOBS, CacheBudget
from engine.events import RunStart
from engine.serve.runs import RunSettings

#: A setting that the side leaves as it is for both.
AS_SET = "as set"
#: What a side may change; everything else (prompt, seed, link, length) is the same for both.
VARIED = ("k", "draft", "prefetch", "policy", "slots")


@dataclass(frozen=True)
class Side:
    """One of two: `name` is A or B. `more_slots`: experts a layer that it got so that both have equal memory."""

    name: str
    settings: RunSettings
    more_slots: int = 0

    @property
    def drafts(self) -> bool:
        """Whether it holds a drafter."""
        return self.settings.engine.draft != "none"

    @property
    def label(self) -> str:
        """Its settings in a line."""
        engine, knobs = self.settings.engine, self.settings.knobs
        slots = f"{knobs['slots']} slots" + (
            f" ({self.more_slots} of them for equal memory)" if self.more_slots else ""
        )
        return f"k = {knobs['k']} · draft {engine.draft} · prefetch {knobs['prefetch']} · {knobs['policy']} · {slots}"


def create_side(name: str, base: RunSettings, changes: Mapping[str, Any]) -> Side:
    """`base` with what the side changes; `AS_SET` or None changes nothing. Raises UsageError."""
    chosen = {key: value for key, value in changes.items() if value not in (AS_SET, None)}
    draft = chosen.pop("draft", base.engine.draft)
    knobs = {**base.knobs, **{key: KNOBS[key].check(value) for key, value in chosen.items()}}
    engine = replace(
        base.engine,
        draft=draft,
        policy=knobs["policy"],
        prefetch=knobs["prefetch"],
        cache=CacheBudget(slots=knobs["slots"]),
    )
    return Side(name, replace(base, engine=engine, generation=replace(base.generation, k=knobs["k"]), knobs=knobs))


def running_order(sides: Sequence[Side], equal_memory: bool) -> list[Side]:
    """A first; but what a draft costs is known once it is loaded, so with equal memory the one that drafts."""
    return sorted(sides, key=lambda side: not side.drafts) if equal_memory else list(sides)


def with_memory_of(side: Side, other: RunStart) -> Side:
    """`side`, which has no draft, with the bytes of the other's draft as slots of its cache, to the nearest slot."""
    slots, experts = other.slots_per_layer, other.model["experts"]
    one = other.memory["cache"] / max(slots, 1)
    own = side.settings.knobs["slots"]
    more = min(round(other.memory["draft"] / one) if one else 0, experts - own)
    if side.drafts or more <= 0:
        return side
    knobs = {**side.settings.knobs, "slots": own + more}
    engine = replace(side.settings.engine, cache=CacheBudget(slots=own + more))
    return replace(side, settings=replace(side.settings, engine=engine, knobs=knobs), more_slots=more)
