"""Where the events of each run wait for those who look: a bounded ring, cursors, and sleepers to wake.

The engine publishes from its own threads and must never wait for a viewer, so publishing stores the
event and, at most, rings a bell. Viewers read from a sequence number on, at their own pace; one that
falls behind the ring is told how many events it lost.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import Callable

from engine.events import Event, RunEnd, RunStart
from engine.serve.wire import FRAME_BYTES, Batch, encode

RING_EVENTS = 20_000
FINISHED_KEPT = 8
FINISHED_TTL_S = 3600.0


class _Entry:
    """An event, until somebody asks for its JSON text; then only the text, which is a fraction of its size."""

    __slots__ = ("payload", "seq")

    def __init__(self, seq: int, event: Event) -> None:
        self.seq = seq
        self.payload: Event | str = event

    def text(self) -> str:
        payload = self.payload  # one read: another viewer may be replacing it
        if not isinstance(payload, str):
            payload = self.payload = encode(self.seq, payload)
        return payload


class Viewer:
    """One reader of a run, on one asyncio loop. `cursor` is the next sequence number that it wants."""

    def __init__(self, run: RunHub, loop: asyncio.AbstractEventLoop, channel: str, cursor: int) -> None:
        self.channel = channel
        self.cursor = max(1, cursor)
        self.armed = False
        self._run = run
        self._loop = loop
        self._bell = asyncio.Event()

    async def wait(self, timeout: float) -> bool:
        """Sleep until there is something at the cursor; False when `timeout` seconds passed first."""
        deadline = self._loop.time() + timeout
        while not self._run.arm(self):  # a loop, since the bell may have rung for what was taken long ago
            try:
                await asyncio.wait_for(self._bell.wait(), deadline - self._loop.time())
            except asyncio.TimeoutError:
                return False
            self._bell.clear()
        return True

    def take(self, max_bytes: int = FRAME_BYTES) -> Batch | None:
        """The next frame, and move past it; None when there is nothing new."""
        batch = self._run.read(self.cursor, max_bytes=max_bytes)
        if batch is not None:
            self.cursor = batch.end + 1
            if self.channel == "websocket":
                self._run.delivered = max(self._run.delivered, batch.end)
        return batch

    def ring(self) -> bool:
        """Wake the sleeper from any thread; False when its loop is gone."""
        try:
            self._loop.call_soon_threadsafe(self._bell.set)
        except RuntimeError:
            return False
        return True


class RunHub:
    """The events of one run. Sequence numbers count from 1.

    The run's first event (RunStart) is kept for ever, since without it nobody can read the others.
    """

    def __init__(
        self, capacity: int = RING_EVENTS, clock: Callable[[], float] = time.monotonic, room: str | None = None
    ) -> None:
        self.id = secrets.token_hex(6)
        self.token = secrets.token_urlsafe(24)
        self.room = room
        self.last_seq = 0
        self.delivered = 0  # what some websocket has sent, so that another channel can go on from there
        self.end: RunEnd | None = None
        self.start: RunStart | None = None
        self._capacity = capacity
        self._ring: list[_Entry | None] = [None] * capacity
        self._first: _Entry | None = None
        self._viewers: set[Viewer] = set()
        self._lock = threading.Lock()
        self._clock = clock
        self._lonely_since: float | None = clock()
        self.ended_at: float | None = None

    def authorizes(self, token: object) -> bool:
        """Whether `token` is this run's, compared in constant time."""
        return isinstance(token, str) and hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def publish(self, event: Event) -> int:
        """Store the event and wake whoever sleeps; returns its sequence number. Any thread; never waits for a viewer.

        Nothing may follow RunEnd: later events are dropped and the last number is returned.
        """
        with self._lock:
            if self.end is not None:
                return self.last_seq
            self.last_seq += 1
            entry = _Entry(self.last_seq, event)
            self._ring[(self.last_seq - 1) % self._capacity] = entry
            if isinstance(event, RunStart):
                self.start, self._first = event, entry
            elif isinstance(event, RunEnd):
                self.end, self.ended_at = event, self._clock()
            sleepers = [viewer for viewer in self._viewers if viewer.armed]
            for viewer in sleepers:
                viewer.armed = False
            seq = self.last_seq
        for viewer in sleepers:
            if not viewer.ring():
                self.detach(viewer)
        return seq

    def read(self, start: int, limit: int = RING_EVENTS, max_bytes: int = FRAME_BYTES) -> Batch | None:
        """Up to `limit` events and about `max_bytes` from number `start` on; None when there are none yet.

        At least one event is returned however long it is.
        """
        start = max(1, start)
        with self._lock:
            if start > self.last_seq:
                return None
            entries = self._held(start, limit)
            head = self._first if self._first and start <= self._first.seq < entries[0].seq else None
        texts = [head.text()] if head else []
        lost = entries[0].seq - start - len(texts)
        size = 0
        for entry in entries:
            text = entry.text()  # outside the lock: the engine must not wait for an encoding
            size += len(text) + 1
            if size > max_bytes and entry is not entries[0]:
                break
            texts.append(text)
            end = entry.seq
        return Batch(self.id, start, end, tuple(texts), lost)

    def lines(self, start: int = 1) -> list[str]:
        """The JSON texts of all events that are still held from number `start` on, RunStart first."""
        with self._lock:
            entries = self._held(max(1, start), self._capacity)
            if self._first and start <= self._first.seq and (not entries or self._first.seq < entries[0].seq):
                entries.insert(0, self._first)
        return [entry.text() for entry in entries]

    def _held(self, start: int, limit: int) -> list[_Entry]:
        first = max(start, self.last_seq - self._capacity + 1)
        entries = (
            self._ring[(seq - 1) % self._capacity] for seq in range(first, min(self.last_seq, first + limit - 1) + 1)
        )
        return [entry for entry in entries if entry is not None]

    def attach(self, cursor: int, channel: str) -> Viewer:
        """A new viewer on the running asyncio loop. `channel` says how it reads: websocket, generator."""
        viewer = Viewer(self, asyncio.get_running_loop(), channel, cursor)
        with self._lock:
            self._viewers.add(viewer)
            self._lonely_since = None
        return viewer

    def detach(self, viewer: Viewer) -> None:
        """The viewer went away; doing it twice is harmless."""
        with self._lock:
            self._viewers.discard(viewer)
            if not self._viewers and self._lonely_since is None:
                self._lonely_since = self._clock()

    def arm(self, viewer: Viewer) -> bool:
        """True when there is something at the viewer's cursor already; otherwise it will be woken."""
        with self._lock:
            viewer.armed = self.last_seq < viewer.cursor
            return not viewer.armed

    def watched_by(self, channel: str) -> int:
        """How many viewers read through `channel` now."""
        with self._lock:
            return sum(viewer.channel == channel for viewer in self._viewers)

    def lonely_for(self) -> float:
        """Seconds without any viewer; 0 while there is one."""
        since = self._lonely_since
        return 0.0 if since is None else self._clock() - since


class HubRegistry:
    """The runs that can be looked at: all that are not over, and the last few that are."""

    def __init__(
        self,
        finished_kept: int = FINISHED_KEPT,
        ttl_s: float = FINISHED_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs: dict[str, RunHub] = {}
        self._kept = finished_kept
        self._ttl = ttl_s
        self._clock = clock
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._runs)

    def create(self, room: str | None = None) -> RunHub:
        """A new run's hub; forgets finished runs that are too old or too many. `room`: who may watch it, too."""
        hub = RunHub(clock=self._clock, room=room)
        with self._lock:
            self._forget()
            self._runs[hub.id] = hub
        return hub

    def find(self, run: object, token: object) -> RunHub | None:
        """The run, if it is known and `token` is its own."""
        hub = self._runs.get(run) if isinstance(run, str) else None
        return hub if hub is not None and hub.authorizes(token) else None

    def seen_from(self, room: object, run: object) -> RunHub | None:
        """The run, if it is known and whoever knows the name of `room` may watch it."""
        hub = self._runs.get(run) if isinstance(run, str) else None
        return hub if hub is not None and hub.room is not None and hub.room == room else None

    def latest(self, room: str) -> RunHub | None:
        """The newest run of a room that has begun, or else the first that waits; None without any."""
        with self._lock:
            runs = [hub for hub in self._runs.values() if hub.room == room]
        begun = [hub for hub in runs if hub.start is not None]
        return begun[-1] if begun else next(iter(runs), None)

    def _forget(self) -> None:
        now = self._clock()
        over = sorted(
            (hub for hub in self._runs.values() if hub.ended_at is not None), key=lambda hub: hub.ended_at or 0
        )
        spare = len(over) - self._kept + 1
        for index, hub in enumerate(over):
            if index < spare or now - (hub.ended_at or now) > self._ttl:
                del self._runs[hub.id]
