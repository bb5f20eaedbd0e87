"""What it costs the engine to be watched: the same runs, in turn, with nobody and with viewers over a websocket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.serve.conversation import Conversation
from engine.serve.hub import RunHub
from engine.serve.session import Session

#: The budget is 3 %; two runs of one kind on a busy machine with two cores may differ by more.
GENEROUS = 1.15
PAIRS = 4
PROMPT = "Tom had a red kite."


class Sink:
    """A websocket whose other side reads everything and says nothing."""

    def __init__(self) -> None:
        self.bytes = 0

    async def receive(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, text: str) -> None:
        self.bytes += len(text.encode())


@contextmanager
def watched(session: Session, viewers: int) -> Iterator[tuple[RunHub, list[Sink]]]:
    """A run's hub with viewers, in a thread of their own as in the server; waits until each has seen the run's end."""
    hub = RunHub()
    sinks = [Sink() for _ in range(viewers)]

    async def show() -> None:
        await asyncio.gather(*(Conversation(session, sink).show(hub) for sink in sinks))

    thread = threading.Thread(target=lambda: asyncio.run(show()))
    thread.start()
    yield hub, sinks
    thread.join(30)
    assert not thread.is_alive()


def measure(engine: Engine, session: Session, viewers: int, tokens: int) -> tuple[list[float], list[float], Any]:
    """Seconds of decoding of each run with nobody, and of each with viewers; the runs take turns."""
    options = GenerationConfig(max_new_tokens=tokens, k=4)
    alone, seen, sinks = [], [], []
    engine.generate([PROMPT], options)
    for _ in range(PAIRS):
        alone.append(engine.generate([PROMPT], options)[0]["decode_s"])
        with watched(session, viewers) as (hub, sinks):
            seen.append(engine.generate([PROMPT], options, emit=hub.publish)[0]["decode_s"])
        assert all(sink.bytes > 100 * tokens for sink in sinks)
    return alone, seen, sinks


def test_being_watched_costs_the_engine_little(session):
    """Everything resident: with no transfers to wait for, what telemetry takes is the largest share."""
    engine = Engine.load(EngineConfig(cache=CacheBudget(share=1.0)))
    try:
        alone, seen, sinks = measure(engine, session, viewers=2, tokens=64)
    finally:
        engine.close()
    print(
        f"{64 / min(alone):.1f} tokens/s alone, {64 / min(seen):.1f} with {len(sinks)} viewers, {sinks[0].bytes} bytes each"
    )
    assert min(seen) < GENEROUS * min(alone)
