"""Which activation an experts module applies, where the compiled kernels know it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import activations
from transformers.integrations import moe


def kernel_activation(module: Any) -> str | None:
    """The name (`engine/kernels/experts.py`) of `act(gate) * up` in this module; None when it does something else.

    Biases and norms are something else too: such experts are computed one by one (`engine/model/ffn.py`).
    """
    if module.has_bias or module.has_post_expert_norm or not module.has_gate:
        return None
    if getattr(type(module), "_apply_gate", None) is not moe._default_apply_gate:
        return None
    act = getattr(module, "act_fn", None)
    if isinstance(act, (torch.nn.SiLU, activations.SiLUActivation)):
        return "silu"
    if isinstance(act, activations.GELUTanh):
        return "gelu_tanh"
    if isinstance(act, torch.nn.GELU):
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    return "gelu" if isinstance(act, activations.GELUActivation) else None
