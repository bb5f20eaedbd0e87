"""The compiled kernels for what is not an expert: linear layers and norms."""

from __future__ import annotations

import torch

from engine.kernels.linear import use_linear_kernel
from engine.kernels.norm import use_norm_kernels


def use_kernels(model: torch.nn.Module) -> None:
    """Let the kernels compute every linear layer and RMS norm of `model` whose weight is on the CPU."""
    use_linear_kernel(model)
    use_norm_kernels(model)
