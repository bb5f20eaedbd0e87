"""Runs of the engine together with everything that it said meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.config import GenerationConfig, KnobBlock
from engine.engine import Engine
from engine.events import Event
from engine.requests import Request

E = TypeVar("E", bound=Event)


@dataclass
class Recording:
    """A run's events in the order in which they were heard, and its results (none when it failed)."""

    events: list[Event] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def ids(self) -> list[list[int]]:
        return [result["token_ids"] for result in self.results]


def record(
    engine: Engine,
    prompts: Sequence[str | Request],
    knobs: KnobBlock | None = None,
    cancel: threading.Event | None = None,
    on_event: Callable[[Event], None] | None = None,
    into: Recording | None = None,
    **options: Any,
) -> Recording:
    """Generate with `options` of GenerationConfig; `cancel` ends the run.

    `on_event` hears each event after it was recorded in `into`.
    """
    recording = into or Recording()
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            recording.events.append(event)
        if on_event is not None:
            on_event(event)

    recording.results = engine.generate(prompts, GenerationConfig(**options), knobs=knobs, emit=emit, stop=cancel)
    return recording
