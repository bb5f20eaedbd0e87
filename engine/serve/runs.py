"""One request: what was asked, and the run that answers it, with its own events, knobs and stop flag."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.config import CacheBudget, EngineConfig, GenerationConfig, KnobBlock, LinkConfig
from engine.errors import UsageError, first_line
from engine.events import Event, RunEnd
from engine.serve.hub import RunHub


@dataclass(frozen=True)
class RunSettings:
    """What one person asked for: the engine to have, the request, and where the live knobs start.

    Raises UsageError for an unknown knob or one out of range.
    """

    prompts: tuple[str, ...]
    engine: EngineConfig = field(default_factory=EngineConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts or any(not prompt.strip() for prompt in self.prompts):
            raise UsageError("the prompt is empty: write a few words to start from")
        KnobBlock(**self.knobs)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> RunSettings:
        """What `to_json` gave. Raises UsageError for anything else."""
        try:
            engine, generation = dict(record["engine"]), dict(record["generation"])
            engine["cache"], engine["link"] = CacheBudget(**engine["cache"]), LinkConfig(**engine["link"])
            engine["kernels"], generation["stop"] = tuple(engine["kernels"]), tuple(generation["stop"])
            return cls(
                tuple(map(str, record["prompts"])),
                EngineConfig(**engine),
                GenerationConfig(**generation),
                dict(record["knobs"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"these are no settings of a run: {first_line(error)}") from None


class Run:
    """One request and everything that belongs to it. `hub` holds its events, `id` and `token` open them."""

    def __init__(
        self, hub: RunHub, settings: RunSettings, on_stop: Callable[[], None], viewer_ttl: float = 30.0
    ) -> None:
        self.hub = hub
        self.settings = settings
        self.knobs = KnobBlock(**settings.knobs)
        self.stopping = threading.Event()
        self._on_stop = on_stop
        self._viewer_ttl = viewer_ttl
        self._last_t = 0

    @property
    def id(self) -> str:
        return self.hub.id

    @property
    def token(self) -> str:
        return self.hub.token

    @property
    def over(self) -> bool:
        return self.hub.end is not None

    def stop(self) -> None:
        """End the run at the next layer, or at once if it still waits. Harmless when it is over."""
        self.stopping.set()
        self._on_stop()

    def set_knob(self, name: str, value: Any, version: int | None = None) -> int:
        """Ask for a new value of a live knob; returns the version to expect in the KnobChange event.

        `version`: the one under which a block elsewhere counts it (see KnobBlock.set).
        Raises UsageError when the knob is unknown, out of range, or the run is over.
        """
        if self.over:
            raise UsageError("this run is over: the setting takes effect with the next one")
        return self.knobs.set(name, value, version)

    def emit(self, event: Event) -> None:
        """Publish an event of the engine; any thread. Also where a run that nobody watches is told to stop."""
        if self.unwanted():
            self.stopping.set()
        self._last_t = max(self._last_t, event.t)
        self.hub.publish(event)

    def unwanted(self) -> bool:
        """Whether somebody stopped the run, or nobody has watched it for `viewer_ttl` seconds."""
        return self.stopping.is_set() or self.hub.lonely_for() > self._viewer_ttl

    def finish(self, status: str, error: str | None = None) -> None:
        """Close the run unless the engine has done so already."""
        self.hub.publish(RunEnd(t=self._last_t, status=status, error=error, summary=[]))
