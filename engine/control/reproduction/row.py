"""One published figure beside ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """`ours` follows from `inputs`, all published; without enough of them it is None, and `why` names what lacks.

    `nearest` is then what the nearest published input gives. No figure is ever fitted to `paper`. A percentage
    is a number of percent.
    """

    source: str
    what: str
    unit: str
    paper: float
    ours: float | None
    inputs: str
    why: str | None = None
    nearest: float | None = None

    def __post_init__(self) -> None:
        if self.ours is None and not self.why:
            raise ValueError(f"{self.what}: without a figure of ours, say which input is missing")
        if self.ours is not None and self.nearest is not None:
            raise ValueError(f"{self.what}: a nearest figure stands in for ours, and ours is there")

    def error(self, value: float | None) -> float | None:
        """Relative to the paper: 0.1 is 10 % too much."""
        return None if value is None else value / self.paper - 1

    def to_json(self) -> dict[str, Any]:
        """All fields, and the errors of `ours` and `nearest`."""
        return {**asdict(self), "error": self.error(self.ours), "nearest_error": self.error(self.nearest)}
