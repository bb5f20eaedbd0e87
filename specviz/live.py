"""The page's websocket: a conversation (engine/serve/conversation.py) with browsers of this very site."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.serve.conversation import NORMAL, POLICY_VIOLATION, Conversation, Refused
from engine.serve.session import Session


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
    """The endpoint of `/specviz/ws`: hello or watch, then batches out and commands in until either side closes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def endpoint(self, socket: WebSocket) -> None:
        if not same_origin(socket.headers):
            await socket.close(POLICY_VIOLATION)
            return
        await socket.accept()
        conversation = Conversation(self._session, _Starlette(socket))
        # Whatever we send now may find the peer gone: starlette says so with either of these.
        with suppress(WebSocketDisconnect, RuntimeError):
            code = NORMAL
            try:
                greeting = await conversation.greeting()
                await (conversation.watch if greeting.get("op") == "watch" else conversation.resume)(greeting)
            except Refused as refusal:
                code = refusal.code
                await conversation.say(op="error", message=str(refusal))
            await socket.close(code)


class _Starlette:
    """Starlette's websocket as a conversation wants it."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def receive(self) -> str | bytes:
        frame = await self._socket.receive()
        if frame["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(frame.get("code", NORMAL))
        text = frame.get("text")
        return text if text is not None else frame.get("bytes", b"")

    async def send(self, text: str) -> None:
        await self._socket.send_text(text)
