"""The JSON that travels from the server to a page: events as lines, and batches of them as frames."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from engine.events import Event

FRAME_BYTES = 64 * 1024


def encode(seq: int, event: Event) -> str:
    """The event as one line of JSON with its `seq`; numbers that JSON lacks (NaN, infinity) become null."""
    # Not Event.to_json(): asdict copies every nested list, several times the cost of the encoding itself.
    record = {"seq": seq, "kind": event.kind, **vars(event)}
    try:
        return json.dumps(record, default=vars, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite({"seq": seq, **event.to_json()}), separators=(",", ":"))


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
