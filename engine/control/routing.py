"""How many experts some rows need, and how many of them are resident: as if drawn at random, or as recorded."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.errors import UsageError


class Routing(Protocol):
    """What a simulation asks of routing; both answers are means over layers and time."""

    def distinct(self, rows: float) -> float:
        """Distinct experts of a layer that `rows` consecutive tokens need."""
        ...

    def missing(self, rows: float, slots: int) -> float:
        """Those of them that an LRU of `slots` experts a layer does not hold when the rows come."""
        ...


@dataclass(frozen=True)
class UniformRouting:
    """Every set of `top_k` experts is as likely as any other, whatever came before."""

    experts: int
    top_k: int

    def distinct(self, rows: float) -> float:
        """N(t) = E(1 - ((E-K)/E)^t) (MoESD, equation 8)."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)

    def missing(self, rows: float, slots: int) -> float:
        """What is resident says nothing about what comes, so any policy finds the resident share."""
        return self.distinct(rows) * max(1 - slots / self.experts, 0.0)


class RecordedRouting:
    """The experts of a real text: for each layer, each token's top-k, in the order of the text."""

    def __init__(self, layers: Sequence[Sequence[Sequence[int]]]) -> None:
        if not layers or not all(layers) or not all(all(tokens) for tokens in layers):
            raise UsageError("a recorded routing needs at least one layer, one token and one expert a token")
        self._layers = [[tuple(token) for token in tokens] for tokens in layers]
        self.top_k = len(self._layers[0][0])
        self.highest = max(expert for tokens in self._layers for token in tokens for expert in token)

    @classmethod
    def from_trace(cls, path: Path) -> RecordedRouting:
        """The routing of the first sequence that a run emitted (`generate --trace FILE`). Raises UsageError."""
        tokens: list[list[list[int]]] = []
        try:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    event: dict[str, Any] = json.loads(line)
                    if event.get("kind") == "round" and event["sequence"] == 0:
                        tokens += [token["experts"] for token in event["tokens"] if token["experts"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"cannot read the routing of {path}: {error}; give a file that --trace wrote") from error
        if not tokens:
            raise UsageError(f"{path} tells no token's experts: give a file that --trace wrote")
        return cls(list(zip(*tokens, strict=True)))

    def distinct(self, rows: float) -> float:
        """Over all windows of that many tokens; longer than the record counts as the whole record."""
        window = self._window(rows)
        counts = [
            len({expert for token in tokens[at : at + window] for expert in token})
            for tokens in self._layers
            for at in range(len(tokens) - window + 1)
        ]
        return sum(counts) / len(counts)

    def missing(self, rows: float, slots: int) -> float:
        """Replays every layer in chunks of that many tokens, through an LRU of its own."""
        window = self._window(rows)
        missed = chunks = 0
        for tokens in self._layers:
            kept: OrderedDict[int, None] = OrderedDict()
            for at in range(0, len(tokens) - window + 1, window):
                wanted = [expert for token in tokens[at : at + window] for expert in token]
                missed += len(set(wanted) - kept.keys())
                chunks += 1
                for expert in wanted:
                    kept[expert] = None
                    kept.move_to_end(expert)
                while len(kept) > slots:
                    kept.popitem(last=False)
        return missed / chunks

    def _window(self, rows: float) -> int:
        return max(1, min(round(rows), min(len(tokens) for tokens in self._layers)))
