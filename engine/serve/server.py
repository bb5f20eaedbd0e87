"""Lends this machine's engine to pages on others: a websocket for each run, guarded by one token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from engine.config import EngineConfig, LinkConfig
from engine.errors import EngineError
from engine.events import SCHEMA_VERSION
from engine.serve.conversation import NORMAL, POLICY_VIOLATION, Conversation, Refused
from engine.serve.runs import Run, RunSettings
from engine.serve.session import Session
from engine.serve.traits import Traits

#: Longest message from a page: a start with its prompts.
START_BYTES = 256 * 1024
PING_S, PING_TIMEOUT_S = 20, 60


@dataclass(frozen=True)
class Offer:
    """What is lent: the model and how this machine computes it. `link`: the slow tier, None leaves it to the page."""

    config: EngineConfig
    link: LinkConfig | None = None

    def settle(self, asked: RunSettings) -> RunSettings:
        """The page's settings, but with this machine's model, device and the like."""
        ours = self.config
        engine = replace(
            asked.engine, model=ours.model, device=ours.device, threads=ours.threads, kernels=ours.kernels,
            pack=ours.pack, misses=ours.misses, link=self.link or asked.engine.link,
        )  # fmt: skip
        return replace(asked, engine=engine)


class EngineServer:
    """Answers to three greetings: info; start, with a run's settings; hello, to see a run further.

    A run outlives its connection by the session's `viewer_ttl`, so that a page can come back.
    """

    def __init__(self, session: Session, token: str, offer: Offer) -> None:
        self._session = session
        self._token = token.encode()
        self._offer = offer
        self._requests: dict[str, Run] = {}

    async def handle(self, connection: ServerConnection) -> None:
        """One connection from greeting to close."""
        conversation = Conversation(self._session, _Socket(connection), START_BYTES)
        with contextlib.suppress(ConnectionClosed):
            code = NORMAL
            try:
                await self._answer(conversation, await conversation.greeting())
            except (Refused, EngineError) as error:
                code = error.code if isinstance(error, Refused) else POLICY_VIOLATION
                await conversation.say(op="error", message=str(error))
            await connection.close(code)

    async def _answer(self, conversation: Conversation, greeting: dict[str, Any]) -> None:
        op = greeting.get("op")
        if op == "hello":
            await conversation.resume(greeting)
            return
        if op not in ("info", "start"):
            raise Refused("the first message must be info, start or hello")
        token = greeting.get("token")
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(errors="replace"), self._token):
            raise Refused("the token is wrong: use the one that the engine was started with")
        if op == "info":
            model = self._offer.config.model
            machine = {"model": model, "traits": Traits.of(model).to_json(), "host": platform.node()}
            await conversation.say(op="info", schema=SCHEMA_VERSION, **machine)
            return
        run = self._start(greeting)
        await conversation.say(op="attach", run=run.id, token=run.token)
        await conversation.show(run.hub)

    def _start(self, greeting: dict[str, Any]) -> Run:
        """A new run, or the one that this very request began before its connection broke."""
        request = str(greeting.get("request"))[:64]
        self._requests = {name: run for name, run in self._requests.items() if not run.over}
        if request not in self._requests:
            settings = self._offer.settle(RunSettings.from_json(greeting.get("settings")))
            self._requests[request] = self._session.start(settings)
        return self._requests[request]


class _Socket:
    """The websockets library's connection as a conversation wants it."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def receive(self) -> str | bytes:
        return await self._connection.recv()

    async def send(self, text: str) -> None:
        await self._connection.send(text)


async def run_server(
    server: EngineServer, host: str, port: int, ready: Callable[[int], None], stop: asyncio.Event
) -> None:
    """Serve until `stop`; `ready` is told the port. Raises OSError when it is taken.

    Browsers are refused (they send an Origin, whatever the page): a page's own server speaks for it.
    """
    async with serve(
        server.handle, host, port, origins=[None], max_size=START_BYTES,
        ping_interval=PING_S, ping_timeout=PING_TIMEOUT_S,
    ) as listening:  # fmt: skip
        ready(listening.sockets[0].getsockname()[1])
        await stop.wait()
