"""What a machine can do at best: its roofs, from datasheets, papers or measurements."""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.profile_files import build_part, check_positive, check_sources, read_profile
from engine.errors import UsageError


@dataclass(frozen=True)
class Processor:
    """A processor and its memory: dense `tflops` (10¹²/s), `memory_gbps` (10⁹ bytes/s), `memory_gib` (2³⁰ bytes)."""

    tflops: float
    memory_gbps: float
    memory_gib: float

    def __post_init__(self) -> None:
        check_positive("a processor", tflops=self.tflops, memory_gbps=self.memory_gbps, memory_gib=self.memory_gib)

    def seconds(self, flops: float, moved: float) -> float:
        """The roofline: time for `flops` operations on `moved` bytes of its memory, at the slower of the two."""
        return max(flops / self.tflops / 1e12, moved / self.memory_gbps / 1e9)

    @property
    def ridge(self) -> float:
        """FLOP/byte above which arithmetic is the limit, below which memory is."""
        return self.tflops * 1e3 / self.memory_gbps


@dataclass(frozen=True)
class HardwareProfile:
    """A machine. Without `gpu` the CPU computes all, and experts wait on disk; with one they wait in host memory.

    `link_gbps`: host to GPU, one direction; `disk_gbps`: reads of an expert's size. Both GB/s.
    """

    name: str
    label: str
    cpu: Processor
    gpu: Processor | None = None
    link_gbps: float | None = None
    disk_gbps: float | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None and self.link_gbps is None:
            raise UsageError(f"hardware {self.name}: a gpu needs link_gbps, the GB/s from host memory to it")
        if self.gpu is None and self.disk_gbps is None:
            raise UsageError(f"hardware {self.name}: without a gpu it needs disk_gbps, from where the experts come")
        if self.link_gbps is not None:
            check_positive(f"hardware {self.name}", link_gbps=self.link_gbps)
        if self.disk_gbps is not None:
            check_positive(f"hardware {self.name}", disk_gbps=self.disk_gbps)

    @property
    def fast(self) -> Processor:
        """Where experts are computed."""
        return self.gpu or self.cpu

    @property
    def fast_lane(self) -> str:
        """Its lane in the simulator: gpu or cpu."""
        return "gpu" if self.gpu else "cpu"

    @property
    def slow_lane(self) -> str:
        """The lane that brings experts into fast memory: link or disk."""
        return "link" if self.gpu else "disk"

    @property
    def slow_gbps(self) -> float:
        """GB/s of that lane."""
        gbps = self.link_gbps if self.gpu else self.disk_gbps
        assert gbps is not None  # __post_init__ saw to it
        return gbps


def load_hardware(name: str) -> HardwareProfile:
    """The profile of that name in assets/profiles/hardware, or in a .json file. Raises UsageError."""
    found = read_profile("hardware", name)
    where = f"hardware {name}"
    check_sources(found, where)
    figures = {key: value for key, value in found.items() if key not in ("sources", "note")}
    for part in ("cpu", "gpu"):
        if figures.get(part) is not None:
            figures[part] = build_part(Processor, figures[part], f"{where}: {part}")
    return build_part(HardwareProfile, {"name": name, **figures}, where)
