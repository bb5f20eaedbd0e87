"""Owns the one engine and its one thread: runs wait in a short line, and each has its own knobs and stop flag."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from engine.config import CacheBudget, EngineConfig, GenerationConfig, KnobBlock
from engine.errors import Cancelled, EngineError, RemoteError, TransferError, one_line
from engine.events import Event, Load, Phase
from engine.serve.hub import HubRegistry
from engine.serve.runs import Run, RunSettings

log = logging.getLogger(__name__)

MAX_WAITING = 8
VIEWER_TTL_S = 30.0
CLOSE_TIMEOUT_S = 10.0
PROGRESS_S = 0.1


class EngineLike(Protocol):
    """What a session needs of an engine; `engine.engine.Engine` has it."""

    config: EngineConfig

    def generate(
        self,
        prompts: list[str],
        options: GenerationConfig,
        *,
        knobs: KnobBlock | None = None,
        emit: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
    ) -> list[dict[str, Any]]: ...

    def knobs(self, options: GenerationConfig) -> KnobBlock: ...

    def close(self) -> None: ...


#: (config, progress(stage, done_bytes, total_bytes), cancelled()) -> engine
Loader = Callable[[EngineConfig, Callable[[str, int, int], None], Callable[[], bool]], EngineLike]


def load_engine(
    config: EngineConfig, progress: Callable[[str, int, int], None], cancelled: Callable[[], bool]
) -> EngineLike:
    """The real engine. Imported here, so that a page can be shown before torch is in memory."""
    from engine.engine import Engine

    return Engine.load(config, progress=progress, cancelled=cancelled)


class Progress:
    """Tells a run how its model loads: each new stage, each end of one, and at most ten times a second between."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stage = ""
        self._due = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == self._stage and done != total and time.monotonic() < self._due:
            return
        self._stage, self._due = stage, time.monotonic() + PROGRESS_S
        self._run.emit(Load(t=0, stage=stage, done_bytes=done, total_bytes=total))


class SessionFull(EngineError):
    """Too many runs wait already."""


class Session:
    """The engine, the thread that drives it, and the line of runs.

    `viewer_ttl`: seconds after which a run that nobody watches is stopped.
    """

    def __init__(
        self,
        load: Loader = load_engine,
        *,
        registry: HubRegistry | None = None,
        max_waiting: int = MAX_WAITING,
        viewer_ttl: float = VIEWER_TTL_S,
    ) -> None:
        self.registry = registry or HubRegistry()
        self.max_waiting = max_waiting
        self.viewer_ttl = viewer_ttl
        self._load = load
        self._engine: EngineLike | None = None
        self._link_pace: dict[str, Any] = {}
        self._waiting: deque[Run] = deque()
        self._runs: dict[str, Run] = {}
        self._current: Run | None = None
        self._state = "idle"
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, settings: RunSettings, room: str | None = None) -> Run:
        """Put a run in the line; those in `room` may watch it. Raises SessionFull when `max_waiting` wait already, or
        when closed.
        """
        with self._changed:
            if self._closed:
                raise SessionFull("the server is shutting down")
            self._drop_waiting()
            if len(self._waiting) >= self.max_waiting:
                raise SessionFull(f"{len(self._waiting)} runs are waiting already: try again in a minute")
            run = Run(self.registry.create(room), settings, self.drop_stopped, self.viewer_ttl)
            ahead = len(self._waiting) + (self._current is not None)
            run.hub.publish(Phase(t=0, phase="queued", detail=f"{ahead} ahead" if ahead else ""))
            self._waiting.append(run)
            self._runs = {key: old for key, old in self._runs.items() if not old.over} | {run.id: run}
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return run

    def find(self, run: object, token: object) -> Run | None:
        """A run that is not over, if `token` is its own."""
        found = self._runs.get(run) if isinstance(run, str) else None
        return found if found is not None and found.hub.authorizes(token) else None

    def drop_stopped(self) -> None:
        """Take runs that were stopped, or that nobody watches any more, out of the line."""
        with self._changed:
            self._drop_waiting()

    def health(self) -> dict[str, Any]:
        """{"status", "engine": idle | loading | running, "waiting", "model"}."""
        with self._changed:
            model = self._engine.config.model if self._engine else None
            return {"status": "ok", "engine": self._state, "waiting": len(self._waiting), "model": model}

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no run is active or waiting; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._current is None and not self._waiting, timeout)

    def close(self) -> None:
        """Stop every run, end the thread, free the engine."""
        with self._changed:
            self._closed = True
            for run in (*self._waiting, *([self._current] if self._current else [])):
                run.stopping.set()
            self._drop_waiting()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _drop_waiting(self) -> None:
        gone = [run for run in self._waiting if run.unwanted()]
        for run in gone:
            self._waiting.remove(run)
            run.finish("stopped")

    def _serve(self) -> None:
        """The engine thread."""
        while (run := self._next()) is not None:
            try:
                self._execute(run)
            finally:
                with self._changed:
                    self._current = None
                    self._state = "idle"
                    self._changed.notify_all()
        self._free_engine()

    def _next(self) -> Run | None:
        with self._changed:
            while True:
                self._drop_waiting()
                if self._waiting:
                    break
                if self._closed:
                    return None
                self._changed.wait(timeout=60)
            self._current = self._waiting.popleft()
            for ahead, run in enumerate(self._waiting, start=1):
                run.hub.publish(Phase(t=0, phase="queued", detail=f"{ahead} ahead"))
            return self._current

    def _execute(self, run: Run) -> None:
        settings = run.settings
        try:
            engine = self._engine_for(run)
            run.knobs.values.update(self._link_pace)
            self._set_state("running")
            engine.generate(
                list(settings.prompts), settings.generation, knobs=run.knobs, emit=run.emit, stop=run.stopping
            )
            run.finish("stopped" if run.stopping.is_set() else "finished")
        except Cancelled:
            run.finish("stopped")
        except (TransferError, RemoteError) as error:
            run.finish("failed", str(error))
            # The next run opens the files anew (a pack that was cut off is built again), or looks for the engine anew.
            self._free_engine()
        except EngineError as error:
            run.finish("failed", str(error))
        except Exception as error:  # the thread must outlive whatever a model does: the next request works
            log.exception("run %s failed", run.id)
            run.finish("failed", one_line(error))
            self._free_engine()  # its state is unknown now

    def _engine_for(self, run: Run) -> EngineLike:
        config = run.settings.engine
        if self._engine is not None and loaded_as(self._engine.config) == loaded_as(config):
            return self._engine
        self._set_state("loading")
        self._free_engine()  # first: two models may not fit

        progress = Progress(run)
        progress("model", 0, 0)
        self._engine = self._load(config, progress, run.unwanted)
        # Only the engine knows what a preset comes to on this machine: it measured its own layers while loading.
        paced = self._engine.knobs(run.settings.generation).values if config.link.preset else {}
        self._link_pace = {name: paced[name] for name in ("link_gbps", "link_latency_us") if name in paced}
        return self._engine

    def _free_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _set_state(self, state: str) -> None:
        with self._changed:
            self._state = state


def loaded_as(config: EngineConfig) -> EngineConfig:
    """The configuration without what the live knobs set anyway: two runs that agree on it share a loaded engine."""
    link = replace(config.link, gbps=1.0, latency_us=0.0) if config.link.gbps is not None else config.link
    return replace(config, policy="lru", prefetch="none", cache=CacheBudget(slots=1), link=link)
