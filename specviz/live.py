"""The websocket: events to the page in small batches, knobs and stop from the page."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.errors import UsageError
from engine.serve.hub import RunHub, Viewer
from engine.serve.session import Session

HELLO_TIMEOUT_S = 5.0
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


def same_origin(headers: Any) -> bool:
    """Whether a page of this very site opened the socket. Browsers send `Origin` and pages cannot forge it;
    programs that are no browsers send none and are guarded by the run's token alone.
    """
    origin = headers.get("origin")
    if origin is None:
        return True
    page = urlsplit(origin)
    default_port = {"http": ":80", "https": ":443"}.get(page.scheme, "")
    hosts = {headers.get("host", ""), headers.get("x-forwarded-host", "")} - {""}
    return bool(page.netloc) and any(host in (page.netloc, page.netloc + default_port) for host in hosts)


class LiveSocket:
    """The endpoint of `/specviz/ws`: one hello, then batches out and commands in until either side closes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def endpoint(self, socket: WebSocket) -> None:
        if not same_origin(socket.headers):
            await socket.close(POLICY_VIOLATION)
            return
        await socket.accept()
        # Whatever we send now may find the peer gone: starlette says so with either of these.
        with suppress(WebSocketDisconnect, RuntimeError):
            code = NORMAL
            try:
                await self._talk(socket)
            except Refused as refusal:
                code = refusal.code
                await send(socket, op="error", message=str(refusal))
            await socket.close(code)

    async def _talk(self, socket: WebSocket) -> None:
        limit = RateLimit()
        try:
            hello = await asyncio.wait_for(receive(socket, limit), HELLO_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise Refused("no hello within 5 seconds") from None
        if hello.get("op") != "hello":
            raise Refused("the first message must be hello")
        hub = self._session.registry.find(hello.get("run"), hello.get("token"))
        if hub is None:
            raise Refused("unknown run or wrong token")
        cursor = hello.get("from", 1)
        if isinstance(cursor, bool) or not isinstance(cursor, int):
            raise Refused("from must be a whole number")
        viewer = hub.attach(cursor, "websocket")
        tasks = [
            asyncio.create_task(self._send_events(socket, hub, viewer)),
            asyncio.create_task(self._obey(socket, hub, limit)),
        ]
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

    async def _send_events(self, socket: WebSocket, hub: RunHub, viewer: Viewer) -> None:
        """Send what is new, at most every 50 ms, until the run's last event went out."""
        while hub.end is None or viewer.cursor <= hub.last_seq:
            await viewer.wait(IDLE_S)
            while (batch := viewer.take()) is not None:
                await socket.send_text(batch.to_json())
            await asyncio.sleep(BATCH_S)

    async def _obey(self, socket: WebSocket, hub: RunHub, limit: RateLimit) -> None:
        """Carry out commands, for ever."""
        while True:
            message = await receive(socket, limit)
            run = self._session.find(hub.id, hub.token)
            op = message.get("op")
            if op == "ping":
                await send(socket, op="pong")
            elif op == "stop":
                if run is not None:
                    run.stop()
            elif op == "set":
                name, value = message.get("name"), message.get("value")
                try:
                    if run is None or not isinstance(name, str):
                        raise UsageError("this run is over: the setting takes effect with the next one")
                    version = run.set_knob(name, value)
                except UsageError as error:
                    await send(socket, op="error", message=str(error))
                else:
                    await send(socket, op="ack", name=name, value=value, version=version)
            else:
                raise Refused("unknown op")


async def receive(socket: WebSocket, limit: RateLimit) -> dict[str, Any]:
    """The next message. Raises Refused when it is too long, too soon or no JSON object; WebSocketDisconnect."""
    text = await _text(socket)
    limit.spend()
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused("not JSON") from None
    if not isinstance(message, dict):
        raise Refused("a message is a JSON object")
    return message


async def _text(socket: WebSocket) -> str:
    frame = await socket.receive()
    if frame["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(frame.get("code", NORMAL))
    text = frame.get("text")
    if text is None:
        raise Refused("send text frames")
    if len(text.encode(errors="replace")) > MESSAGE_BYTES:
        raise Refused("message too long", TOO_BIG)
    return text


async def send(socket: WebSocket, **message: Any) -> None:
    """Send one JSON object of protocol version 1."""
    await socket.send_text(json.dumps({"v": 1, **message}))
