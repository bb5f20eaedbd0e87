"""Published machines whose ratio of transfer time to compute time an emulated link can reproduce.

On such a machine an expert crosses the link in so many times the time that one layer takes to compute. A
small model on a laptop with a link paced to the same ratio waits and overlaps in the same proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.hardware_profile import load_hardware
from engine.control.model_profile import load_model
from engine.errors import UsageError


@dataclass(frozen=True)
class PublishedMachine:
    """A model on a GPU behind a link: names of their profiles, which hold the figures and their sources."""

    name: str
    label: str
    model: str
    hardware: str

    @property
    def ratio(self) -> float:
        """Transfer time of one expert over compute time of one layer, which at batch 1 reads its weights once."""
        model, hardware = load_model(self.model), load_hardware(self.hardware)
        active = model.top_k * model.expert_bytes + model.layer_params * model.other_bits / 8
        return (model.expert_bytes / hardware.slow_gbps) / (active / hardware.fast.memory_gbps)


PRESETS: dict[str, PublishedMachine] = {
    machine.name: machine
    for machine in (
        PublishedMachine("phi3.5-a100", "Phi-3.5-MoE on A100-40GB, PCIe 4", "phi-3.5-moe", "a100-40gb"),
        PublishedMachine("mixtral-a30", "Mixtral-8x7B on A30, PCIe 4", "mixtral-8x7b", "a30"),
        PublishedMachine(
            "deepseek-lite-a100", "DeepSeek-V2-Lite on A100-40GB, PCIe 4", "deepseek-v2-lite", "a100-40gb"
        ),
        PublishedMachine("qwen3-30b-4090", "Qwen3-30B-A3B on RTX 4090, PCIe 4", "qwen3-30b-a3b", "rtx4090"),
    )
}


def find_preset(name: str) -> PublishedMachine:
    """The published machine of that name. Raises UsageError with the known names."""
    if name not in PRESETS:
        raise UsageError(f"unknown link preset {name!r}: use one of {', '.join(PRESETS)}, or emulated:GBPS")
    return PRESETS[name]


def emulated_gbps(machine: PublishedMachine, expert_bytes: int, layer_seconds: float) -> float:
    """The GB/s at which an expert of `expert_bytes` takes `machine.ratio` times `layer_seconds`."""
    return expert_bytes / (machine.ratio * layer_seconds) / 1e9
