"""Seconds of a model's operators on a processor, by its roofline: no kernel is faster, real ones are slower.

Operations and bytes as in SpecMoEOff, section 3 (its table of operators).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.hardware_profile import Processor
from engine.control.model_profile import ModelProfile
from engine.errors import UsageError


@dataclass(frozen=True)
class Work:
    """Floating-point operations, and bytes of the processor's own memory."""

    flops: float
    moved: float

    def on(self, processor: Processor) -> float:
        """Seconds by the roofline."""
        return processor.seconds(self.flops, self.moved)


def weights(params: float, bits: float, rows: float) -> Work:
    """Rows times a matrix: two operations a weight and row, and the weights read once."""
    return Work(2 * params * rows, params * bits / 8)


def shared_work(model: ModelProfile, rows: float) -> Work:
    """What every row passes in one layer: projections, router, shared experts."""
    return weights(model.layer_params, model.other_bits, rows)


def rest_work(model: ModelProfile, rows: float) -> Work:
    """Once a pass: the weights of the head and of layers without experts (whose attention is not counted)."""
    return weights(model.dense_params + model.head_params, model.other_bits, rows)


def attention_work(model: ModelProfile, rows: float, sequences: float, context: float) -> Work:
    """Scores and sums of one layer; each sequence's keys and values are read once for all its rows."""
    return Work(model.attention.flops * rows * context, model.kv_bytes(1) * sequences * context)


def experts_work(model: ModelProfile, rows: float, distinct: float, bits: float | None = None) -> Work:
    """The routed experts of one layer, of which `distinct` are needed."""
    bits = model.expert_bits if bits is None else bits
    return Work(2 * model.expert_params * model.top_k * rows, distinct * model.expert_params * bits / 8)


@dataclass(frozen=True)
class Workload:
    """What is asked: `batch` sequences of `prompt` tokens that grow by `output`, drafts of `k`, accepted how often."""

    batch: int = 1
    k: int = 4
    prompt: int = 512
    output: int = 128
    acceptance: float = 0.8

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("k", 0), ("prompt", 1), ("output", 1)):
            if getattr(self, name) < low:
                raise UsageError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not 0 <= self.acceptance <= 1:
            raise UsageError(f"acceptance is a share between 0 and 1, not {self.acceptance}")

    @property
    def rows(self) -> int:
        """Rows of a verifying pass."""
        return self.batch * (self.k + 1)

    @property
    def context(self) -> float:
        """Cached tokens of a sequence, on average while it grows."""
        return self.prompt + self.output / 2

    @property
    def longest(self) -> int:
        """Tokens of a sequence at its end: what memory must hold."""
        return self.prompt + self.output

    @property
    def tokens(self) -> float:
        """Tokens of one sequence and round, the bonus token included: 1 + a + a² + … + a^k (Leviathan et al.)."""
        return sum(self.acceptance**i for i in range(self.k + 1))
