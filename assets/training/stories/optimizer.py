"""Muon for the matrices, AdamW for the rest."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def orthogonalize(gradient: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest (semi-)orthogonal matrix, roughly: all singular values become about 1.

    `gradient` (…, rows, columns). Quintic Newton–Schulz iteration with the coefficients of
    Jordan et al. 2024, "Muon"; it runs in bfloat16 because it forgives rounding.
    """
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, then an orthogonal step. Takes matrices, or stacks of them (one for each expert)."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                velocity = self.state[matrix].setdefault("velocity", torch.zeros_like(matrix))
                velocity.mul_(group["momentum"]).add_(matrix.grad)
                update = orthogonalize(matrix.grad + group["momentum"] * velocity)
                # A tall matrix needs a longer step for the same change of its output.
                length = group["lr"] * max(1.0, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
                matrix.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-length)


def create_optimizers(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on attention and expert matrices; AdamW on embeddings, routers and norms, where Muon is a poor fit."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        plain = parameter.ndim < 2 or "embed_tokens" in name or "lm_head" in name or "mlp.gate" in name
        (rest if plain else matrices).append(parameter)
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(matrices, muon_lr), adam]
