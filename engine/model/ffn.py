"""What transformers' experts modules do with the matrices of one expert, in every layout that they declare.

The contract is `batched_mm_experts_forward` of transformers (integrations/moe.py): biases, gates of the module's own,
experts without a gate, a norm behind each expert. Interleaved gate and up need nothing of us, because such a module
splits them itself (`_apply_gate`), and all that lies before treats rows alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DOWN = "down_proj"

#: (rows, in) and what stands for a matrix (out, in), and its bias → (rows, out).
Linear = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def gate_up_name(module: Any) -> str:
    """The parameter that holds the first projection."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def apply_expert(module: Any, expert: int, x: torch.Tensor, gate_up: Any, down: Any, linear: Linear) -> torch.Tensor:
    """x (rows, H) through one expert: (rows, H), before the router's weight.

    `linear` multiplies with gate_up and down, whatever these are. Biases are a thousandth of an expert, so they stay
    in `module`, resident and shared by target and draft: in the expert's record they would make slots, links and
    the kernels' matrices more complicated, to save nothing.
    """
    inner = linear(x, gate_up, _bias(module, gate_up_name(module), expert))
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = linear(inner, down, _bias(module, DOWN, expert))
    return module.post_expert_norm(out) if module.has_post_expert_norm else out


def _bias(module: Any, name: str, expert: int) -> torch.Tensor | None:
    return getattr(module, f"{name}_bias")[expert] if module.has_bias else None
