"""A run as a file: one JSON object a line, written whole or not at all, and read back with its mistakes named.

`chrome_trace` turns the same events into the JSON that Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from engine.events import EVENTS, SCHEMA_VERSION
from specviz.metrics import Metrics

Record = dict[str, Any]


def save_events(path: Path, lines: Iterable[str]) -> None:
    """Write JSON texts, one a line, to `path` (gzipped when it ends in .gz); a reader never sees half a file."""
    data = "".join(line + "\n" for line in lines).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp keeps files to their owner
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def load_events(path: Path) -> list[Record]:
    """The events of a recorded run, each with `seq` and `kind`. Raises UsageError naming the file and line."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the recording {path}: {error}") from error
    return parse_events(text.splitlines(), str(path))


def parse_events(lines: Iterable[str], name: str = "recording") -> list[Record]:
    """Recorded lines as events. Raises UsageError for what is no event of this schema version or out of order."""
    events: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            event = json.loads(line)
        except ValueError:
            raise UsageError(f"{where} is not JSON: is the file cut off?") from None
        _check(event, events[-1]["seq"] if events else 0, where)
        events.append(event)
    if not any(event["kind"] == "run_start" for event in events):
        raise UsageError(f"{name} holds no run_start: it is no recording of a run")
    return events


def _check(event: Any, previous: int, where: str) -> None:
    if not isinstance(event, dict) or event.get("kind") not in EVENTS:
        kind = event.get("kind") if isinstance(event, dict) else None
        raise UsageError(f"{where}: unknown event kind {kind!r}")
    if not isinstance(event.get("seq"), int) or event["seq"] <= previous:
        raise UsageError(f"{where}: sequence numbers must rise")
    if event["kind"] == "run_start" and event.get("schema") != SCHEMA_VERSION:
        raise UsageError(
            f"{where}: recorded with schema version {event.get('schema')}, this program reads {SCHEMA_VERSION}"
        )
    for field in dataclasses.fields(EVENTS[event["kind"]]):
        if field.default is not dataclasses.MISSING:  # told since later than the recording, perhaps
            event.setdefault(field.name, field.default)
    missing = EVENTS[event["kind"]].__dataclass_fields__.keys() - event.keys()
    if missing:
        raise UsageError(f"{where}: {event['kind']} lacks {', '.join(sorted(missing))}")


def lost_events(events: list[Record]) -> int:
    """How many events the recording lacks, told from the gaps in the sequence numbers."""
    return events[-1]["seq"] - len(events) if events else 0


def summary(events: list[Record]) -> dict[str, Any]:
    """What a run came to: its facts, its end, the command line's result objects, and all metrics."""
    metrics = Metrics()
    for event in events:
        metrics.add(event)
    start = next((event for event in events if event["kind"] == "run_start"), {})
    end = next((event for event in reversed(events) if event["kind"] == "run_end"), {})
    facts = ("model", "machine", "link", "config", "memory", "slots_per_layer", "started_unix")
    return {
        "schema": SCHEMA_VERSION,
        "run": {name: start.get(name) for name in facts},
        "status": end.get("status", "running"),
        "error": end.get("error"),
        "results": end.get("summary", []),
        "events": len(events),
        "lost_events": lost_events(events),
        "metrics": metrics.to_json(),
    }
