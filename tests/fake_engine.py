"""An engine of the real one's shape that computes nothing: it tells a plausible run, round by round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine import events as ev
from engine.config import EngineConfig, GenerationConfig, KnobBlock
from engine.errors import ModelError

MS = 1_000_000


class FakeEngine:
    """`round_s` seconds a round; `fail_at` raises in that round; `loads` counts what `load` was asked for."""

    def __init__(self, config: EngineConfig, round_s: float = 0.002, fail_at: int | None = None) -> None:
        self.config = config
        self.round_s = round_s
        self.fail_at = fail_at
        self.closed = False
        self.threads: set[str] = set()
        self.rounds_done = 0

    def generate(
        self,
        prompts: list[str],
        options: GenerationConfig,
        *,
        knobs: KnobBlock | None = None,
        emit: Callable[[ev.Event], None] | None = None,
        stop: threading.Event | None = None,
    ) -> list[dict[str, Any]]:
        assert emit is not None and stop is not None and knobs is not None
        self.threads.add(threading.current_thread().name)
        prompt = [[{"id": 7, "text": text}] for text in prompts]
        model = {"name": "fake", "moe_layers": 1, "experts": 4, "top_k": 2, "layers": 1, "expert_bytes": 100}
        config = {"k": options.k, "seed": options.seed, **knobs.values}
        memory = {"shared": 1, "draft": 1, "cache": 1, "kv": 1, "total": 4}
        link = {"kind": "disk", "label": "disk", "gbps": 1.0, "latency_us": 0.0, "emulated": False}
        emit(ev.RunStart(0, ev.SCHEMA_VERSION, model, {}, link, config, memory, 2, prompt, 0.0))
        emit(ev.Phase(0, "decode"))
        status, error, emitted, t, index = "finished", None, 0, 0, 0
        while emitted < options.max_new_tokens and error is None:
            if stop.wait(self.round_s):
                status = "stopped"
                break
            for update, old in knobs.take():
                emit(ev.KnobChange(t, index, update.name, old, update.value, update.version))
            if index == self.fail_at:
                status, error = "failed", "the disk went away: check the cable"
                break
            t = self._round(index, t, emit, prompts[0], emitted)
            emitted, index, self.rounds_done = emitted + 1, index + 1, index + 1
        summary = [{"text": "x" * emitted, "new_tokens": emitted} for _ in prompts]
        emit(ev.RunEnd(t, status, error, summary))
        if error:
            raise ModelError(error)
        return summary

    def _round(self, index: int, t: int, emit: Callable[[ev.Event], None], prompt: str, emitted: int) -> int:
        end = t + 10 * MS
        token = ev.Token(index, f"{prompt[:4]}{emitted} ", "plain", 0, 0.5)
        emit(ev.Compute(end, index, "verify", "experts", 0, 1, t, end))
        emit(ev.Round(end, index, 0, 0, 0, 0, 0, [token], [], t, t, t, end, 0))
        return end

    def knobs(self, options: GenerationConfig) -> KnobBlock:
        return KnobBlock(link_gbps=0.125, link_latency_us=10)

    def close(self) -> None:
        self.closed = True


class FakeLoader:
    """Makes engines; remembers them and their configurations."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.engines: list[FakeEngine] = []
        self.error: Exception | None = None

    def __call__(
        self, config: EngineConfig, progress: Callable[[str, int, int], None], cancelled: Callable[[], bool]
    ) -> FakeEngine:
        progress("experts", 50, 100)
        if self.error is not None:
            raise self.error
        self.engines.append(FakeEngine(config, **self.options))
        return self.engines[-1]
