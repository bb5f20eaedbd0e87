"""Asking a layer's own router about hidden states that are not its own (next-layer prefetch)."""

from __future__ import annotations

import torch

from engine.model.skeleton import Skeleton


class RouterProbe:
    """Applies the router of a MoE layer to any hidden states. Routers stay transformers' own.

    `available` is false when the model's routers do not hand out their choice (some decide outside the router
    module); then next-layer prediction is not possible.
    """

    def __init__(self, skeleton: Skeleton) -> None:
        names = {id(module): name for name, module in skeleton.model.named_modules()}
        self._routers = [self._find(skeleton, names[id(module)]) for module in skeleton.experts_modules]
        self.available = all(router is not None for router in self._routers)

    @torch.no_grad()
    def guess(self, layer: int, hidden: torch.Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """What `layer`'s router would choose for hidden (rows, H): (index, weights), each (rows, top_k)."""
        router = self._routers[layer]
        assert router is not None, "guess() needs an available probe"
        index, weights = _choice(router(hidden))
        return index.tolist(), weights.tolist()

    @staticmethod
    def _find(skeleton: Skeleton, experts_name: str) -> torch.nn.Module | None:
        block = skeleton.model.get_submodule(experts_name.rpartition(".")[0])
        width = skeleton.table.shape.hidden
        if width != skeleton.model.config.get_text_config().hidden_size:
            return None  # experts live in a space of their own, whose states say nothing to a router
        hidden = torch.zeros(1, width, dtype=skeleton.model.dtype, device=skeleton.model.device)
        for name, child in block.named_children():
            if name in ("gate", "router"):
                try:
                    with torch.no_grad():
                        _choice(child(hidden))
                except (ValueError, TypeError):
                    return None
                return child
        return None


def _choice(output) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, weights) out of a router's tuple, which every architecture orders in its own way."""
    if not isinstance(output, tuple):
        raise ValueError("the router hands out no choice")
    index = next((t for t in output if torch.is_tensor(t) and not t.is_floating_point()), None)
    if index is None:
        raise ValueError("the router hands out no expert ids")
    weights = next((t for t in output if torch.is_tensor(t) and t.is_floating_point() and t.shape == index.shape), None)
    if weights is None:
        raise ValueError("the router hands out no weights")
    return index, weights
