"""A small checkpoint on disk, and sources that block, fail and remember."""

from __future__ import annotations

import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.model.layout import ExpertRecord, ExpertShape, ExpertTable, Segment
from engine.offload.transfer import Transfer

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 4, 24, 20
PARTS = ("gate", "up", "down")


def expert_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {
        f"{layer}.{expert}.{part}": torch.randn(shapes[part], generator=generator).to(dtype)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for part in PARTS
    }


class Checkpoint:
    """One shard a layer; `table` is built from the files' own headers, `flat` from the tensors saved."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.directory = directory
        self.tensors = expert_tensors(dtype)
        self.shards = [directory / f"shard-{layer}.safetensors" for layer in range(LAYERS)]
        where: dict[str, Segment] = {}
        for layer, shard in enumerate(self.shards):
            save_file({n: t for n, t in self.tensors.items() if n.startswith(f"{layer}.")}, shard)
            raw = shard.read_bytes()
            (length,) = struct.unpack("<Q", raw[:8])
            for name, info in json.loads(raw[8 : 8 + length]).items():
                if name != "__metadata__":
                    start, stop = info["data_offsets"]
                    where[name] = Segment(shard, 8 + length + start, stop - start)
        self.table = ExpertTable(
            ExpertShape(HIDDEN, INTERMEDIATE, dtype),
            tuple(
                tuple(
                    ExpertRecord(layer, expert, tuple(where[f"{layer}.{expert}.{part}"] for part in PARTS))
                    for expert in range(EXPERTS)
                )
                for layer in range(LAYERS)
            ),
        )

    def flat(self, layer: int, expert: int) -> torch.Tensor:
        return torch.cat([self.tensors[f"{layer}.{expert}.{part}"].flatten() for part in PARTS])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path, torch.bfloat16)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[[torch.dtype], Checkpoint]:
    return lambda dtype: Checkpoint(tmp_path, dtype)


class FakeSource:
    """Experts in memory; expert e of layer l is full of values that no other has.

    `gate(layer, expert)` blocks reads of it until the returned event is set; `failing` pairs raise OSError.
    """

    def __init__(self, layers: int = 2, experts: int = 6, intermediate: int = 16, hidden: int = 32) -> None:
        self.dtype = torch.bfloat16
        shape = ExpertShape(hidden, intermediate, self.dtype)
        nothing = Segment(Path("nowhere"), 0, shape.nbytes)
        self.table = ExpertTable(
            shape, tuple(tuple(ExpertRecord(i, e, (nothing,)) for e in range(experts)) for i in range(layers))
        )
        self.failing: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, int, int]] = []
        self.entered: dict[tuple[int, int], threading.Event] = {}
        self.closed = False
        self._gates: dict[tuple[int, int], threading.Event] = {}

    @property
    def expert_nbytes(self) -> int:
        return self.table.shape.nbytes

    def path(self, layer: int, expert: int) -> Path:
        return Path(f"fake-{layer}.safetensors")

    def flat(self, layer: int, expert: int) -> torch.Tensor:
        first = layer * self.table.experts + expert + 1
        return (torch.arange(self.table.shape.numel) % 64 + 64 * first).to(self.dtype)

    def gate(self, layer: int, expert: int) -> threading.Event:
        self.entered[layer, expert] = threading.Event()
        return self._gates.setdefault((layer, expert), threading.Event())

    def read(self, layer: int, expert: int, offset: int, out: torch.Tensor) -> None:
        self.reads.append((layer, expert, offset))
        gate = self._gates.get((layer, expert))
        if gate is not None:
            self.entered[layer, expert].set()
            assert gate.wait(60)
        if (layer, expert) in self.failing:
            raise OSError(5, "Input/output error")
        out.copy_(self.flat(layer, expert).view(torch.uint8)[offset : offset + out.numel()])

    def close(self) -> None:
        for gate in self._gates.values():
            gate.set()
        self.closed = True


@pytest.fixture
def source() -> Iterator[FakeSource]:
    source = FakeSource()
    yield source
    source.close()


@pytest.fixture
def make_source() -> type[FakeSource]:
    return FakeSource


class Witness:
    """A cache observer that keeps everything and holds it to the protocol."""

    def __init__(self) -> None:
        self.transfers: dict[int, Transfer] = {}
        self.outcomes: dict[int, str] = {}
        self.stalls: list[tuple[int, int, int]] = []

    def transfer(self, transfer: Transfer) -> None:
        assert transfer.id not in self.transfers
        assert 0 < transfer.queued_ns <= transfer.start_ns <= transfer.end_ns
        self.transfers[transfer.id] = transfer

    def settled(self, transfer_id: int, outcome: str) -> None:
        assert transfer_id in self.transfers and transfer_id not in self.outcomes
        self.outcomes[transfer_id] = outcome

    def stall(self, layer: int, start_ns: int, end_ns: int) -> None:
        assert start_ns <= end_ns
        self.stalls.append((layer, start_ns, end_ns))

    def counts(self) -> Counter[str]:
        return Counter(self.outcomes.values())


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def make_witness() -> type[Witness]:
    return Witness
