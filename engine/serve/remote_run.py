"""One run on another machine, followed to its end over as many connections as it takes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from engine.config import KnobBlock, KnobUpdate
from engine.errors import Cancelled, RemoteError, first_line
from engine.events import Connection, Event, RunEnd
from engine.serve.conversation import POLICY_VIOLATION
from engine.serve.lag import Lag
from engine.serve.remote import ANSWER_S, BROKEN, Remote, hear, say
from engine.serve.runs import RunSettings
from engine.serve.wire import decode

#: How long a knob, a stop, or the engine's silence may go unnoticed.
TURN_S = 0.02
RETRY_FIRST_S, RETRY_MOST_S = 0.25, 4.0
#: Less than the time for which the engine keeps a run that nobody watches.
GIVE_UP_S = 60.0
TELL_EVERY_S = 1.0


class RemoteRun:
    """The run that `settings` ask for. `emit` hears its events in order, each once; `knobs` and `stop` go there."""

    def __init__(
        self,
        remote: Remote,
        settings: RunSettings,
        knobs: KnobBlock,
        emit: Callable[[Event], None],
        stop: threading.Event,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._remote = remote
        self._settings = settings
        self._knobs = knobs
        self._emit = emit
        self._stop = stop
        self._give_up_s = give_up_s
        self._request = secrets.token_hex(8)
        self._run: dict[str, Any] | None = None  # its id and token there
        self._seen = 0  # the last sequence number that arrived
        self._t = 0
        self._lost = 0
        self._end: RunEnd | None = None
        self._unacknowledged: dict[str, KnobUpdate] = {}
        self._stop_sent = False
        self._complaint: Any = None
        self._lag = Lag()
        self._told_at = float("-inf")
        self._told_lag = False

    def follow(self) -> list[dict[str, Any]]:
        """Start the run there and stay with it to its end; its results. Raises RemoteError and Cancelled."""
        broken_at: float | None = None
        wait_s = RETRY_FIRST_S
        while self._end is None:
            try:
                with self._remote.connect() as socket:
                    self._greet(socket)
                    if broken_at is not None:
                        self._tell(connected=True)
                    broken_at, wait_s = None, RETRY_FIRST_S
                    self._listen(socket)
            except BROKEN as error:
                if isinstance(error, ConnectionClosed) and error.rcvd and error.rcvd.code == POLICY_VIOLATION:
                    raise self._refusal(self._complaint) from error
                if broken_at is None:
                    broken_at = time.monotonic()
                    self._tell(connected=False)
                elif time.monotonic() - broken_at > self._give_up_s:
                    raise RemoteError(
                        f"the engine at {self._remote.url} has been out of reach for {self._give_up_s:.0f} s "
                        f"({first_line(error)}): see whether it still runs there"
                    ) from error
                if self._end is None and self._stop.wait(wait_s):
                    raise Cancelled("stopped while the engine was out of reach") from error
                wait_s = min(2 * wait_s, RETRY_MOST_S)
        return self._end.summary

    def _greet(self, socket: ClientConnection) -> None:
        """Start the run, or go on with it after the last event that is here."""
        self._stop_sent = False
        if self._run is not None:
            say(socket, op="hello", **self._run, **{"from": self._seen + 1})
            for update in self._unacknowledged.values():
                self._send_knob(socket, update)
            return
        settings = self._settings.to_json()
        say(socket, op="start", token=self._remote.token, request=self._request, settings=settings)
        answer = hear(socket.recv(ANSWER_S))
        if answer.get("op") == "error":
            raise self._refusal(answer.get("message"))
        self._run = {name: answer.get(name) for name in ("run", "token")}

    def _listen(self, socket: ClientConnection) -> None:
        """Pass events on and commands back, until the end."""
        while self._end is None:
            for update, _ in self._knobs.take():
                self._unacknowledged[update.name] = update
                self._send_knob(socket, update)
            if self._stop.is_set() and not self._stop_sent:
                say(socket, op="stop")
                self._stop_sent = True
            try:
                text = socket.recv(TURN_S)
            except TimeoutError:
                continue
            message = hear(text)
            if "events" in message:
                self._take(message)
            elif message.get("op") == "ack":
                self._acknowledged(message)
            elif message.get("op") == "error":
                self._complaint = message.get("message")  # of a knob too late, or why it will close the connection

    def _take(self, batch: dict[str, Any]) -> None:
        """A batch of events; those that came before the connection broke are skipped."""
        self._lost += batch["lost"]
        newest = 0
        for record in batch["events"]:
            if record["seq"] <= self._seen:
                continue
            self._seen = record["seq"]
            event = decode(record)
            newest = max(newest, event.t)
            if isinstance(event, RunEnd):
                self._end = event
            self._emit(event)
        if newest:  # before the run's start there is no clock
            self._t = max(self._t, newest)
            self._lag.arrived(newest, time.monotonic())
        self._tell_lag()

    def _tell_lag(self) -> None:
        """Say that the network is slower than the engine, once a second while it is, and when it no longer is."""
        if self._end is None and (self._lag.noticeable or self._told_lag or self._lost > 0):
            now = time.monotonic()
            if now - self._told_at >= TELL_EVERY_S:
                self._told_at, self._told_lag = now, self._lag.noticeable
                self._tell(connected=True)

    def _tell(self, connected: bool) -> None:
        if self._end is None:
            self._emit(Connection(self._t, connected, self._lag.behind_s, self._lost))

    def _send_knob(self, socket: ClientConnection, update: KnobUpdate) -> None:
        say(socket, op="set", name=update.name, value=update.value, version=update.version)

    def _acknowledged(self, message: dict[str, Any]) -> None:
        waiting = self._unacknowledged.get(message.get("name", ""))
        if waiting is not None and waiting.version == message.get("version"):
            del self._unacknowledged[waiting.name]

    def _refusal(self, why: Any) -> RemoteError:
        return RemoteError(f"the engine at {self._remote.url} refused: {why}")
