"""Published machines whose ratio of transfer time to compute time an emulated link can reproduce.

On such a machine an expert crosses the link in so many times the time that one layer takes to compute. A
small model on a laptop with a link paced to the same ratio waits and overlaps in the same proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import UsageError

BYTES = 2  # bfloat16 or float16


@dataclass(frozen=True)
class PublishedMachine:
    """A model on a GPU behind a link, from published figures.

    `expert_params` are those of one routed expert, `layer_params` those that one token reads in one layer
    (attention, its routed and shared experts); `link_gbps` and `memory_gbps` in GB/s.
    """

    name: str
    label: str
    expert_params: int
    layer_params: int
    link_gbps: float
    memory_gbps: float
    source: str

    @property
    def ratio(self) -> float:
        """Transfer time of one expert over compute time of one layer, which at batch 1 reads its weights once."""
        transfer = self.expert_params * BYTES / self.link_gbps
        return transfer / (self.layer_params * BYTES / self.memory_gbps)


def _attention(hidden: int, query: int, key_value: int) -> int:
    """Parameters of the four projections, with the total widths of queries and of keys (or values)."""
    return 2 * hidden * query + 2 * hidden * key_value


def _machine(
    name: str, label: str, expert: int, active: int, attention: int, link: float, memory: float, source: str
) -> PublishedMachine:
    return PublishedMachine(name, label, expert, active * expert + attention, link, memory, source)


PRESETS: dict[str, PublishedMachine] = {
    machine.name: machine
    for machine in (
        _machine("phi3.5-a100", "Phi-3.5-MoE on A100-40GB, PCIe 4", 3 * 4096 * 6400, 2,
                 _attention(4096, 4096, 1024), 16, 1555,
                 "MoE-SpeQ (2511.14102) section 4: PCIe 4.0 x16 at 16 GB/s; A100-40GB HBM2 1,555 GB/s; model config"),
        _machine("mixtral-a30", "Mixtral-8x7B on A30, PCIe 4", 3 * 4096 * 14336, 2,
                 _attention(4096, 4096, 1024), 25, 933,
                 "SpecMoEOff (2508.21706) table 1: 25 GB/s H2D, 933 GB/s HBM; model config"),
        _machine("deepseek-lite-a100", "DeepSeek-V2-Lite on A100-40GB, PCIe 4", 3 * 2048 * 1408, 8,
                 2048 * 3072 + 2048 * 576 + 512 * 4096 + 2048 * 2048, 16, 1555,
                 "MoE-SpeQ (2511.14102) section 4; model config: 6 routed and 2 shared experts a token, MLA"),
        _machine("qwen3-30b-4090", "Qwen3-30B-A3B on RTX 4090, PCIe 4", 3 * 2048 * 768, 8,
                 _attention(2048, 4096, 512), 25, 1008,
                 "MoE-SpAc (2603.09983) setup; RTX 4090 GDDR6X 1,008 GB/s; PCIe 4.0 x16 as in SpecMoEOff table 1"),
    )
}  # fmt: skip


def find_preset(name: str) -> PublishedMachine:
    """The published machine of that name. Raises UsageError with the known names."""
    if name not in PRESETS:
        raise UsageError(f"unknown link preset {name!r}: use one of {', '.join(PRESETS)}, or emulated:GBPS")
    return PRESETS[name]


def emulated_gbps(machine: PublishedMachine, expert_bytes: int, layer_seconds: float) -> float:
    """The GB/s at which an expert of `expert_bytes` takes `machine.ratio` times `layer_seconds`."""
    return expert_bytes / (machine.ratio * layer_seconds) / 1e9
