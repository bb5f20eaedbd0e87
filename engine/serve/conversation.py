"""What is said over a websocket: one greeting, then a run's events out in small batches and commands in.

The page's socket and that of `python -m engine serve` speak the same; only the greetings that they take differ.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from engine.errors import UsageError
from engine.serve.hub import RunHub
from engine.serve.rooms import is_room
from engine.serve.session import Session
from engine.serve.wire import FRAME_BYTES

VERSION = 1
HELLO_TIMEOUT_S = 5.0
#: Longest message of a page, which only greets and moves knobs.
MESSAGE_BYTES = 4096
MESSAGES_PER_S = 50
BURST = 100
BATCH_S = 0.05
#: A viewer that takes long for each frame gets fewer and longer ones, so that it does not fall ever farther behind.
CATCH_UP_BYTES = 1 << 20
IDLE_S = 20.0
#: How soon a watcher sees that the next run of the room began.
NEXT_RUN_S = 0.3
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
        await self._both(self._send_events(hub, cursor, "websocket"), hub)

    async def watch(self, hello: dict[str, Any]) -> None:
        """Show all runs of the room that {"op": "watch", "room", "run", "from"} names, and obey nothing.

        Each run begins with {"op": "attach", "run"}; one that the watcher knows already goes on at `from`.
        """
        room, cursor = hello.get("room"), hello.get("from", 1)
        if not is_room(room) or isinstance(cursor, bool) or not isinstance(cursor, int):
            raise Refused("this is no watch link: ask for a new one")
        await self._both(self._send_room(str(room), hello.get("run"), cursor), None)

    async def _both(self, sending: Coroutine[Any, Any, None], hub: RunHub | None) -> None:
        """Send and listen until one of the two ends."""
        tasks = [asyncio.create_task(sending), asyncio.create_task(self._obey(hub))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in done if (error := task.exception()) is not None]
            if errors:
                raise errors[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # not gather: it would replace a cancellation of this very task by its own

    async def say(self, **message: Any) -> None:
        """Send one JSON object."""
        await self._socket.send(json.dumps({"v": VERSION, **message}))

    async def _send_events(self, hub: RunHub, cursor: int, channel: str) -> None:
        """Send what is new, at most every 50 ms, to the run's end."""
        viewer = hub.attach(cursor, channel)
        try:
            while hub.end is None or viewer.cursor <= hub.last_seq:
                await viewer.wait(IDLE_S)
                size = FRAME_BYTES
                while (batch := viewer.take(size)) is not None:
                    await self._socket.send(batch.to_json())
                    size = min(2 * size, CATCH_UP_BYTES)
                await asyncio.sleep(BATCH_S)
        finally:
            hub.detach(viewer)

    async def _send_room(self, room: str, known: object, cursor: int) -> None:
        """One run of the room after the other, for ever."""
        last = None
        while True:
            hub = self._session.registry.latest(room)
            if hub is None or hub is last:
                await asyncio.sleep(NEXT_RUN_S)
                continue
            last = hub
            await self.say(op="attach", run=hub.id)
            await self._send_events(hub, cursor if hub.id == known else 1, "watcher")

    async def _obey(self, hub: RunHub | None) -> None:
        """Carry out commands, for ever; of those who only watch (no `hub`), none but a ping."""
        while True:
            message = await self._receive()
            run = self._session.find(hub.id, hub.token) if hub is not None else None
            op = message.get("op")
            if op == "ping":
                await self.say(op="pong")
            elif hub is None and op in ("stop", "set"):
                await self.say(op="error", message="you are watching: only who started the run can change it")
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
