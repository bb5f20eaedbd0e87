"""What the controls do: start a run and stand by it, move a knob, stop.

A browser keeps only its run's id and token (in gr.State); the run itself belongs to the session.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import gradio as gr

from engine.config import Knob
from engine.errors import EngineError, UsageError
from engine.serve.hub import Viewer
from engine.serve.rooms import is_key, new_key, room_of
from engine.serve.runs import Run, RunSettings
from engine.serve.session import Session
from specviz.compare import create_side
from specviz.ui.controls import Controls

#: (run id, token), or None before the first run.
RunRef = tuple[str, str] | None

GoOn = Callable[[Run, dict[str, Any]], AsyncGenerator[tuple[str, Any], None]]

GRACE_S = 3.0
TURN_S = 0.15
TURN_BYTES = 256 * 1024
IDLE_S = 1.0


async def generate(
    session: Session, controls: Controls, values: list[Any], key: str = "", **changes: Any
) -> AsyncIterator[tuple[str, Any]]:
    """Start a run and yield (message, run): how to attach, then what the websocket does not carry, then the end.

    Messages are JSON texts for bridge.js. The generator stays with the run until it ends, as one of its viewers.
    `key`: the page's, so that those with its watch link see the run. `changes` replace settings, as in `create_side`.
    """
    with refusals():
        run = start(session, create_side("", controls.settings(values), changes).settings, key)
    async with aclosing(stand_by(run, {})) as messages:
        async for message in messages:
            yield message


@contextmanager
def refusals() -> Iterator[None]:
    """What cannot be run is one line that Gradio shows."""
    try:
        yield
    except EngineError as error:
        raise gr.Error(str(error), print_exception=False) from error


def start(session: Session, settings: RunSettings, key: str) -> Run:
    """Put a run into the line, and into the room of the page's `key`."""
    return session.start(settings, room_of(key) if is_key(key) else None)


async def rejoin(session: Session, stored: str, go_on: GoOn | None = None) -> AsyncIterator[tuple[str, Any, str]]:
    """What a page that was (re)loaded gets: (message, run, key). It goes on with its run if that still is on.

    `stored` is what bridge.js kept in the tab: {"key", "run", "token"} as JSON, or nothing. `go_on` stands by a run
    that may be one of several; `stand_by` unless told.
    """
    kept = _object(stored)
    key = str(kept.get("key"))
    if not is_key(key):
        key = new_key()
    room = {"key": key, "room": room_of(key)}
    run = session.find(kept.get("run"), kept.get("token"))
    if run is None or run.over:
        yield json.dumps({"op": "room", **room}), None, key
        return
    async with aclosing((go_on or stand_by)(run, room)) as messages:
        async for message, ref in messages:
            yield message, ref, key


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


async def stand_by(run: Run, more: dict[str, Any]) -> AsyncGenerator[tuple[str, Any], None]:
    """Stay with a run until it ends, as one of its viewers; `more` goes with the first message and the last.

    Only the first message names the run: the page may have gone on to another one when later ones come.
    """
    ref = (run.id, run.token)
    viewer = run.hub.attach(1, "generator")
    try:
        yield json.dumps({"op": "attach", "run": run.id, "token": run.token, **more}), ref
        async for frame in fallback(run, viewer):
            yield f'{{"op":"feed","batch":{frame}}}', gr.skip()
        end = run.hub.end
        assert end is not None
        if end.error:
            gr.Warning(end.error, title="The run failed")
        done = {"op": "end", "run": run.id, "last": run.hub.last_seq, "status": end.status, "error": end.error}
        yield json.dumps({**done, **more, "results": end.summary}), gr.skip()
    finally:
        run.hub.detach(viewer)


async def fallback(run: Run, viewer: Viewer) -> AsyncIterator[str]:
    """Frames for a page whose websocket has not been open for `GRACE_S` seconds; returns at the run's end."""
    hub = run.hub
    last_open = time.monotonic()
    while True:
        await viewer.wait(IDLE_S)
        if hub.watched_by("websocket"):
            last_open = time.monotonic()
        viewer.cursor = max(viewer.cursor, hub.delivered + 1)
        if time.monotonic() - last_open > GRACE_S and (batch := viewer.take(TURN_BYTES)) is not None:
            yield batch.to_json()
        if hub.end is not None and viewer.cursor > hub.last_seq:
            return
        await asyncio.sleep(TURN_S)  # a page that gets more than it can draw lags behind


def move_knob(session: Session, knob: Knob, ref: RunRef, value: Any) -> None:
    """Pass a moved knob to this browser's run; without one, the value waits for the next Generate."""
    run = session.find(*ref) if ref else None
    if run is None or run.over or value is None:
        return
    try:
        run.set_knob(knob.name, value)
    except UsageError as error:
        gr.Warning(str(error))


def stop(session: Session, ref: RunRef) -> None:
    """Stop this browser's run, if it has one."""
    run = session.find(*ref) if ref else None
    if run is not None:
        run.stop()
