"""What a viewer costs: one that is slow neither delays the engine nor lags behind when the run is over."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from engine import events as ev
from engine.serve.conversation import Conversation
from engine.serve.hub import RunHub


class SlowSocket:
    """Takes `frame_s` seconds for each frame, as a page that draws slowly; says nothing."""

    def __init__(self, frame_s: float) -> None:
        self.frame_s = frame_s
        self.began: list[float] = []
        self.seqs: list[int] = []

    async def send(self, text: str) -> None:
        self.began.append(time.monotonic())
        self.seqs += [event["seq"] for event in json.loads(text)["events"]]
        await asyncio.sleep(self.frame_s)

    async def receive(self) -> str:
        await asyncio.sleep(60)
        return ""


@pytest.mark.parametrize("frame_s", [0.0, 0.2])
def test_the_last_frame_is_there_soon_after_the_run_s_end_however_slow_the_viewer(session, frame_s):
    hub, socket = RunHub(), SlowSocket(frame_s)
    took: list[float] = []

    def engine() -> None:
        """100 tokens a second, and 8 KB of events for each, as the included model tells them."""
        for n in range(200):
            time.sleep(0.01)
            began = time.perf_counter()
            for _ in range(20):
                hub.publish(ev.Phase(n, "decode", "x" * 350))
            took.append(time.perf_counter() - began)
        hub.publish(ev.RunEnd(0, "finished", None, []))

    async def watch() -> float:
        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.wait_for(Conversation(session, socket).show(hub), 30)
        await asyncio.to_thread(thread.join)
        return hub.ended_at

    ended_at = asyncio.run(watch())
    assert socket.seqs == list(range(1, hub.last_seq + 1))
    late = [began for began in socket.began if began > ended_at]
    # The frame under way, and what came meanwhile.
    assert len(late) <= 2, f"{len(late)} frames after the end, the last {late[-1] - ended_at:.2f} s"
    # Publishing waits for nobody: far less than a frame of the viewer.
    assert sorted(took)[len(took) // 2] < 0.01
