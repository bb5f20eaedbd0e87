"""What happens inside a forward pass, layer by layer: who was routed where, what it cost, what to fetch next."""

from __future__ import annotations

import torch

from engine.offload.cache import ExpertCache
from engine.offload.experts import gate_scores
from engine.offload.transfer import Transfer
from engine.recorder import Recorder
from engine.speculation.prefetcher import Prefetcher


class PassObserver:
    """Follows the passes of a round for the recorder, the prefetcher and the governor.

    It hears of layers from the experts (`LayerObserver`) and of transfers from the cache; `routes[layer]` are
    the choices of the last target pass, one row a real token, sequence after sequence, `gates[layer]` their weights.
    """

    def __init__(self) -> None:
        self.prefetcher: Prefetcher | None = None
        self.routes: dict[int, list[list[int]]] = {}
        self.gates: dict[int, list[list[float]]] = {}
        self._recorder: Recorder | None = None
        self._cache: ExpertCache | None = None
        self._lane = ""
        self._mark = 0
        self._row_positions: list[int] = []
        self._resident: list[set[int]] = []

    def attach(self, recorder: Recorder | None, cache: ExpertCache) -> None:
        """From now on report to `recorder` (None: to nobody)."""
        self._recorder, self._cache = recorder, cache

    def begin(self, lane: str, rows: list[int] | None = None) -> None:
        """A draft starts, or a target pass over rows[b] tokens of each sequence b."""
        self._lane = lane
        if lane == "draft":
            assert self._cache is not None
            self._resident = [set(experts) for experts in self._cache.resident()]
        else:
            self.routes.clear()
            self._row_positions = [position for count in rows or [] for position in range(count)]
        self._mark = self._now()

    def routed(self, layer: int, index: list[list[int]], weights: list[list[float]], hidden: torch.Tensor) -> None:
        if self._recorder is not None:
            self._recorder.check()
        if self._lane == "draft":
            if self.prefetcher is not None:
                self.prefetcher.drafted(layer, index, weights)
            return
        self._slice("attention", layer, len(index))
        self.routes[layer], self.gates[layer] = index, weights
        if self.prefetcher is not None:
            self.prefetcher.reached(layer, index)
            if self._lane == "verify":
                self.prefetcher.verifying(layer, hidden)

    def computed(self, layer: int, rows: int) -> None:
        if self._lane != "draft":
            self._slice("experts", layer, rows)

    def token_drafted(self, position: int) -> None:
        """Draft pass `position` of this round is done."""
        self._slice("token", -1, 1)

    def end(self) -> None:
        """The target pass is done; what came after its last experts was the output head."""
        if self.prefetcher is not None:
            self.prefetcher.passed()
        self._slice("head", -1, len(self._row_positions))

    def experts_by_rows(self) -> tuple[list[int], list[int]]:
        """For r = 1, 2, …: distinct experts of the first r rows, and those not resident when the round began."""
        rows = max(self._row_positions, default=-1) + 1
        wanted, missing = [0] * rows, [0] * rows
        order = sorted(range(len(self._row_positions)), key=self._row_positions.__getitem__)
        for layer, index in self.routes.items():
            seen: set[int] = set()
            sizes = [(0, 0)] * rows
            for row in order:
                seen.update(index[row])
                # A position's last row has them all.
                sizes[self._row_positions[row]] = len(seen), len(seen - self._resident[layer])
            for r, (all_of_them, absent) in enumerate(sizes):
                wanted[r] += all_of_them
                missing[r] += absent
        return wanted, missing

    def accepted(self, lengths: list[int]) -> None:
        """Of each sequence's rows the first `lengths[b]` stand; the cache forgets what the others asked for."""
        stands, left = [], iter(lengths)
        for position in self._row_positions:
            if position == 0:
                length = next(left)
            stands.append(position < length)
        if all(stands):
            return
        assert self._cache is not None
        for layer, index in self.routes.items():
            rows = list(zip(index, self.gates[layer], stands, strict=True))
            dropped = gate_scores([row for row, _, ok in rows if not ok], [gate for _, gate, ok in rows if not ok])
            self._cache.rejected(layer, dropped, {expert for row, _, ok in rows if ok for expert in row})

    # The cache's observer.

    def transfer(self, transfer: Transfer) -> None:
        if self._recorder is not None:
            self._recorder.transfer(transfer)

    def settled(self, transfer_id: int, outcome: str) -> None:
        if self._recorder is not None:
            self._recorder.settled(transfer_id, outcome)

    def stall(self, layer: int, start_ns: int, end_ns: int) -> None:
        if self._recorder is not None:
            self._recorder.stall(layer, start_ns, end_ns)

    def _slice(self, op: str, layer: int, rows: int) -> None:
        now = self._now()
        if self._recorder is not None:
            self._recorder.compute(self._lane, op, layer, rows, self._mark, now)
        self._mark = now

    def _now(self) -> int:
        return self._recorder.now() if self._recorder is not None else 0
