"""An engine on another machine, with the surface of one in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.config import EngineConfig, GenerationConfig, KnobBlock
from engine.events import Event
from engine.serve.remote import Remote
from engine.serve.remote_run import RemoteRun
from engine.serve.runs import RunSettings
from engine.serve.session import Loader, load_engine
from engine.serve.traits import Traits


def find_engine(url: str | None, token: str, model: str) -> tuple[str, Loader, Traits]:
    """(model, loader, the model's traits) of the engine at `url`; without one, of `model` in this process.

    Raises RemoteError.
    """
    if url is None:
        return model, load_engine, Traits.of(model)
    remote = Remote(url, token)
    info = remote.info()
    return str(info["model"]), remote_loader(remote), Traits.from_json(info.get("traits"))


def remote_loader(remote: Remote) -> Loader:
    """A session's loader for the engine there. It checks that it is there; the model is loaded there, with the first
    run, whose events tell of it. The loader raises RemoteError.
    """

    def load(
        config: EngineConfig, progress: Callable[[str, int, int], None], cancelled: Callable[[], bool]
    ) -> RemoteEngine:
        remote.info()
        return RemoteEngine(remote, config)

    return load


class RemoteEngine:
    """Stands for the engine at the other end. `config` is what runs ask for; model and device are the other's own."""

    def __init__(self, remote: Remote, config: EngineConfig) -> None:
        self.config = config
        self._remote = remote

    def generate(
        self,
        prompts: list[str],
        options: GenerationConfig,
        *,
        knobs: KnobBlock | None = None,
        emit: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
    ) -> list[dict[str, Any]]:
        """As `Engine.generate`; the run's events also tell how the model loads there, and Connection.

        A run that failed there ends like any other, with the error in its RunEnd. Raises RemoteError when the engine
        refuses the run or is lost, and Cancelled when `stop` was set meanwhile.
        """
        knobs = knobs or self.knobs(options)
        settings = RunSettings(tuple(prompts), self.config, options, dict(knobs.values))
        run = RemoteRun(self._remote, settings, knobs, emit or (lambda event: None), stop or threading.Event())
        return run.follow()

    def knobs(self, options: GenerationConfig) -> KnobBlock:
        """The live knobs as far as they are known here; a preset's pace is measured there."""
        return KnobBlock(k=options.k, k_max=options.k_max, prefetch=self.config.prefetch, policy=self.config.policy)

    def close(self) -> None:
        """Nothing is held between runs."""
