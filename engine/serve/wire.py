"""The JSON that travels: events as lines, and batches of them as frames."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

from engine.errors import RemoteError
from engine.events import EVENTS, Event, Rejected, Round, Token

FRAME_BYTES = 64 * 1024
#: Made once: json.dumps would make one at each call, a third of the cost of a short event.
_ENCODER = json.JSONEncoder(default=vars, allow_nan=False, separators=(",", ":"))


def encode(seq: int, event: Event) -> str:
    """The event as one line of JSON with its `seq`; numbers that JSON lacks (NaN, infinity) become null."""
    # Not Event.to_json(): asdict copies every nested list, several times the cost of the encoding itself.
    record = {"seq": seq, "kind": event.kind, **vars(event)}
    try:
        return _ENCODER.encode(record)
    except ValueError:
        return json.dumps(_finite({"seq": seq, **event.to_json()}), separators=(",", ":"))


def decode(record: dict[str, Any]) -> Event:
    """The event that `encode` made `record` of. Raises RemoteError for what is none of this version."""
    try:
        kind = EVENTS[record["kind"]]
        values = {field.name: record[field.name] for field in fields(kind) if field.name in record}
        if kind is Round:
            values["tokens"] = [Token(**token) for token in values["tokens"]]
            values["rejected"] = [Rejected(**token) for token in values["rejected"]]
        return kind(**values)
    except (KeyError, TypeError) as error:
        raise RemoteError(f"the other side sent no event of this version: {record.get('kind')!r}, {error}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


@dataclass(frozen=True)
class Batch:
    """Events `start` to `end` (sequence numbers, both included), each a JSON text; `lost` fell out of the ring."""

    run: str
    start: int
    end: int
    events: tuple[str, ...]
    lost: int

    def to_json(self) -> str:
        """The frame that viewers receive: {"v", "run", "from", "to", "events", "lost"}."""
        head = f'{{"v":1,"run":{json.dumps(self.run)},"from":{self.start},"to":{self.end},"lost":{self.lost},"events":['
        return head + ",".join(self.events) + "]}"
