"""How an engine on another machine is reached."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from engine.errors import RemoteError, first_line
from engine.events import SCHEMA_VERSION
from engine.serve.conversation import VERSION

CONNECT_S = 5.0
ANSWER_S = 10.0
#: Longest message of an engine; batches are 64 KiB, but one event may be longer.
MESSAGE_BYTES = 8 << 20
#: What says that a connection broke, or none came about.
BROKEN = (ConnectionClosed, InvalidHandshake, OSError, TimeoutError)


@dataclass(frozen=True)
class Remote:
    """Where an engine is served (`python -m engine serve`) and the token that opens it. `url`: ws://HOST:PORT or wss://…"""

    url: str
    token: str

    def connect(self) -> ClientConnection:
        """A new connection. Raises one of BROKEN, and RemoteError for a wrong address."""
        try:
            return connect(self.url, open_timeout=CONNECT_S, close_timeout=1, max_size=MESSAGE_BYTES)
        except InvalidURI:
            raise RemoteError(f"{self.url!r} is no address of an engine: use ws://HOST:PORT") from None

    def info(self) -> dict[str, Any]:
        """What the engine says of itself: `model`, its `traits`, `host`.

        Raises RemoteError when it is not there or refuses us.
        """
        try:
            with self.connect() as socket:
                say(socket, op="info", token=self.token)
                answer = hear(socket.recv(ANSWER_S))
        except BROKEN as error:
            raise RemoteError(
                f"no engine answers at {self.url} ({first_line(error)}): start one there with "
                "`python -m engine serve`, and check host, port and firewall"
            ) from error
        if answer.get("op") == "error":
            raise RemoteError(f"the engine at {self.url} refused: {answer.get('message')}")
        if answer.get("schema") != SCHEMA_VERSION:
            raise RemoteError(
                f"the engine at {self.url} tells events of version {answer.get('schema')}, this program reads "
                f"{SCHEMA_VERSION}: use the same version on both machines"
            )
        return answer


def say(socket: ClientConnection, **message: Any) -> None:
    """Send one JSON object."""
    socket.send(json.dumps({"v": VERSION, **message}))


def hear(text: str | bytes) -> dict[str, Any]:
    """A message as an object. Raises RemoteError when it is none."""
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise RemoteError("what answers there is no engine of this program")
    return message
