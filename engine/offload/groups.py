"""The rows that each expert of a layer computes, and the buffer in which their outputs wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.kernels.experts import combine, expert_ffn
from engine.kernels.linear import kernel_linear
from engine.model.activation import kernel_activation
from engine.model.ffn import apply_expert
from engine.model.seams import ExpertsModule
from engine.offload.stream import Lease


class RowGroups:
    """`members[expert]` are the rows routed to it and the positions in their top-k.

    Outputs are summed over the positions, in order, whatever order the experts arrived in.
    """

    def __init__(self, hidden: torch.Tensor, index: list[list[int]]) -> None:
        self.hidden = hidden
        self.members: dict[int, tuple[list[int], list[int]]] = {}
        for row, experts in enumerate(index):
            for position, expert in enumerate(experts):
                rows, positions = self.members.setdefault(expert, ([], []))
                rows.append(row)
                positions.append(position)
        self._outputs = self._room(len(index), len(index[0]))

    def input(self, expert: int) -> torch.Tensor:
        """The rows routed to `expert`: (its rows, H)."""
        rows, _ = self.members[expert]
        return self.hidden if len(rows) == len(self.hidden) else self.hidden[rows]

    def put(self, expert: int, output: torch.Tensor) -> None:
        """What `expert` made of its rows."""
        rows, positions = self.members[expert]
        if len(rows) == 1:
            self._outputs[rows[0], positions[0]] = output[0]
        else:
            self._outputs[rows, positions] = output.to(self._outputs.dtype)

    def compute(self, module: ExpertsModule, leases: Sequence[Lease]) -> None:
        """Run the leased experts on their rows."""
        for lease in leases:
            x = self.input(lease.expert)
            self.put(lease.expert, apply_expert(module, lease.expert, x, lease.gate_up, lease.down, F.linear))

    def combine(self, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each row's outputs; weights (rows, top_k) → (rows, H)."""
        return (self._outputs * weights.to(self._outputs.dtype).unsqueeze(-1)).sum(1)

    def _room(self, rows: int, top_k: int) -> torch.Tensor:
        return self.hidden.new_empty(rows, top_k, self.hidden.shape[1])


class KernelRowGroups(RowGroups):
    """The same with the compiled kernels: outputs wait in float32, and are rounded once."""

    def compute(self, module: ExpertsModule, leases: Sequence[Lease]) -> None:
        activation = kernel_activation(module)
        if activation is None:
            # One by one: with experts as large as gpt-oss's (50 MB, 2 cores) 5.2 ms for 1 row and 8.4 ms for 5, where
            # the fused kernel takes 4.5 and 5.9 ms for plain ones, and torch 6.3 and 13.2 ms.
            for lease in leases:
                x = self.input(lease.expert)
                self.put(lease.expert, apply_expert(module, lease.expert, x, lease.gate_up, lease.down, kernel_linear))
            return
        top_k = self._outputs.shape[1]
        offsets, rows, slots = [0], [], []
        for lease in leases:
            members, positions = self.members[lease.expert]
            rows += members
            slots += [row * top_k + position for row, position in zip(members, positions, strict=True)]
            offsets.append(len(rows))
        expert_ffn(
            self.hidden.contiguous(),
            [lease.gate_up.contiguous() for lease in leases],
            [lease.down.contiguous() for lease in leases],
            torch.tensor(offsets),
            torch.tensor(rows),
            torch.tensor(slots),
            self._outputs.flatten(0, 1),
            activation,
        )

    def combine(self, weights: torch.Tensor) -> torch.Tensor:
        return combine(self._outputs, weights, self.hidden)

    def _room(self, rows: int, top_k: int) -> torch.Tensor:
        return torch.empty(rows, top_k, self.hidden.shape[1])
