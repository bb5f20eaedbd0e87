"""What is said over a websocket: one greeting, then a run's events out in small batches and commands in.

The page's socket and that of `python -m engine serve` speak the same; only the greetings that they take differ.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Protocol

from engine.errors import UsageError
from engine.serve.hub import RunHub, Viewer
from engine.serve.session import Session

VERSION = 1
HELLO_TIMEOUT_S = 5.0
#: Longest message of a page, which only greets and moves knobs.
MESSAGE_BYTES = 4096
MESSAGES_PER_S = 50
BURST = 100
BATCH_S = 0.05
IDLE_S = 20.0
POLICY_VIOLATION, TOO_BIG, NORMAL = 1008, 1009, 1000


class Refused(Exception):
    """The peer broke the protocol; `code` is the websocket close code."""

    def __init__(self, message: str, code: int = POLICY_VIOLATION) -> None:
        super().__init__(message)
        self.code = code


class Socket(Protocol):
    """A websocket of any library, accepted. Both methods raise the library's own error when the peer is gone."""

    async def receive(self) -> str | bytes: ...

    async def send(self, text: str) -> None: ...


class RateLimit:
    """A token bucket: `BURST` messages at once, `MESSAGES_PER_S` in the long run."""

    def __init__(self) -> None:
        self._tokens = float(BURST)
        self._last = time.monotonic()

    def spend(self) -> None:
        """Count one message. Raises Refused when there were too many."""
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._last) * MESSAGES_PER_S) - 1
        self._last = now
        if self._tokens < 0:
            raise Refused("too many messages")


class Conversation:
    """One peer. `message_bytes`: the longest message that it may send."""

    def __init__(self, session: Session, socket: Socket, message_bytes: int = MESSAGE_BYTES) -> None:
        self._session = session
        self._socket = socket
        self._limit = RateLimit()
        self._message_bytes = message_bytes

    async def greeting(self) -> dict[str, Any]:
        """The first message. Raises Refused when none comes, or no JSON object."""
        try:
            return await asyncio.wait_for(self._receive(), HELLO_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise Refused("no hello within 5 seconds") from None

    async def resume(self, hello: dict[str, Any]) -> None:
        """Show the run that {"op": "hello", "run", "token", "from"} names, to its end. Raises Refused."""
        if hello.get("op") != "hello":
            raise Refused("the first message must be hello")
        hub = self._session.registry.find(hello.get("run"), hello.get("token"))
        if hub is None:
            raise Refused("unknown run or wrong token")
        cursor = hello.get("from", 1)
        if isinstance(cursor, bool) or not isinstance(cursor, int):
            raise Refused("from must be a whole number")
        await self.show(hub, cursor)

    async def show(self, hub: RunHub, cursor: int = 1) -> None:
        """Send the run's events from number `cursor` on, and obey commands, until the run's last event went out."""
        viewer = hub.attach(cursor, "websocket")
        tasks = [asyncio.create_task(self._send_events(hub, viewer)), asyncio.create_task(self._obey(hub))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in done if (error := task.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            hub.detach(viewer)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # not gather: it would replace a cancellation of this very task by its own

    async def say(self, **message: Any) -> None:
        """Send one JSON object."""
        await self._socket.send(json.dumps({"v": VERSION, **message}))

    async def _send_events(self, hub: RunHub, viewer: Viewer) -> None:
        """Send what is new, at most every 50 ms."""
        while hub.end is None or viewer.cursor <= hub.last_seq:
            await viewer.wait(IDLE_S)
            while (batch := viewer.take()) is not None:
                await self._socket.send(batch.to_json())
            await asyncio.sleep(BATCH_S)

    async def _obey(self, hub: RunHub) -> None:
        """Carry out commands, for ever."""
        while True:
            message = await self._receive()
            run = self._session.find(hub.id, hub.token)
            op = message.get("op")
            if op == "ping":
                await self.say(op="pong")
            elif op == "stop":
                if run is not None:
                    run.stop()
            elif op == "set":
                name, value, version = message.get("name"), message.get("value"), message.get("version")
                try:
                    if run is None or not isinstance(name, str):
                        raise UsageError("this run is over: the setting takes effect with the next one")
                    version = run.set_knob(name, value, version if isinstance(version, int) else None)
                except UsageError as error:
                    await self.say(op="error", message=str(error))
                else:
                    await self.say(op="ack", name=name, value=value, version=version)
            else:
                raise Refused("unknown op")

    async def _receive(self) -> dict[str, Any]:
        """The next message. Raises Refused when it is too long, too soon or no JSON object."""
        text = await self._socket.receive()
        if not isinstance(text, str):
            raise Refused("send text frames")
        if len(text.encode(errors="replace")) > self._message_bytes:
            raise Refused("message too long", TOO_BIG)
        self._limit.spend()
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise Refused("not JSON") from None
        if not isinstance(message, dict):
            raise Refused("a message is a JSON object")
        return message
