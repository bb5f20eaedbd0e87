"""The expert lookahead buffer: which experts the coming verification needs (MoE-SpeQ, section 3.4)."""

from __future__ import annotations

from collections.abc import Collection

from engine.offload.experts import gate_scores


class LookaheadBuffer:
    """A (rows × layers) table of (experts, gate weights), filled while the draft runs.

    Row i of a round is the i-th token of the chunk that will be verified: row 0 the newest emitted token,
    rows 1..k the draft tokens. In a batch a row holds the choices of all sequences.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.clear()

    def clear(self) -> None:
        self._rows: list[list[dict[int, float]]] = []
        #: Per layer: every expert that some row needs, with its summed gate weight.
        self.plan: list[dict[int, float]] = [{} for _ in range(self._layers)]

    def add(self, layer: int, index: list[list[int]], weights: list[list[float]]) -> dict[int, float]:
        """The next row's choice at `layer`; layer 0 opens the row. Returns the experts that no earlier row needs."""
        if layer == 0 or not self._rows:
            self._rows.append([{} for _ in range(self._layers)])
        row = self._rows[-1][layer] = gate_scores(index, weights)
        wanted = self.plan[layer]
        fresh = {expert: weight for expert, weight in row.items() if expert not in wanted}
        for expert, weight in row.items():
            wanted[expert] = wanted.get(expert, 0.0) + weight
        return fresh

    def __len__(self) -> int:
        return len(self._rows)


class Demand:
    """How often each expert of a layer was wanted lately: the share of rows, older ones counting less."""

    #: About the last 20 rows count: two or three drafts.
    KEEP = 1 - 1 / 20

    def __init__(self, layers: int) -> None:
        self._rows = [0.0] * layers
        self._wanted: list[dict[int, float]] = [{} for _ in range(layers)]

    def add(self, layer: int, experts: Collection[int]) -> None:
        """One more row."""
        self._rows[layer] = self._rows[layer] * self.KEEP + 1
        wanted = self._wanted[layer]
        for expert in wanted:
            wanted[expert] *= self.KEEP
        for expert in experts:
            wanted[expert] = wanted.get(expert, 0.0) + 1

    def likely(self, layer: int, rows: int) -> set[int]:
        """The experts that one of the next `rows` rows wants with a chance of a half or more, if rows are independent.

        1 - (1 - share)^rows ≥ 1/2.
        """
        if rows < 1:
            return set()
        return set(self.wanted_by(layer, 1 - 0.5 ** (1 / rows)))

    def wanted_by(self, layer: int, share: float) -> list[int]:
        """The experts that at least `share` of the rows wanted, those that most did first."""
        wanted, least = self._wanted[layer], share * self._rows[layer]
        return sorted((e for e, count in wanted.items() if count >= least), key=lambda e: -wanted[e])
