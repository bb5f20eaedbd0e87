"""The two places where the engine steps into a transformers model: its experts and its attention.

Both are registries of transformers (`ALL_EXPERTS_FUNCTIONS`, `AttentionInterface`); no modeling code is
copied or patched, so every router, norm, rotary embedding and shared expert stays transformers' own.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.errors import ModelError
from engine.kernels.attention import chunked_attention

EXPERTS = "offload"
ATTENTION = "offload"


class ExpertsModule(Protocol):
    """What the engine uses of a transformers experts module."""

    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor:
        """The activation between the two projections: (rows, 2I) → (rows, I)."""


class ExpertsBackend(Protocol):
    """Whoever computes the routed experts of one MoE layer."""

    def __call__(
        self, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H)."""


def attach_backend(module: torch.nn.Module, backend: ExpertsBackend) -> None:
    """Let `backend` compute this experts module. The seam passes no layer index, so each module keeps its own."""
    module.offload_backend = backend  # type: ignore[assignment]


def _experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    return module.offload_backend(module, hidden, top_k_index, top_k_weights)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    for name in ("softcap", "s_aux", "sinks", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"attention with {name} is not supported yet ({type(module).__name__})")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return chunked_attention(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, q_offset, kv_offset: int, mask_function, device=None, **kwargs
) -> torch.Tensor:
    """A boolean mask (batch, 1, q, kv), true where a query may look.

    `q_offset` is what `KVCache.get_query_offset` returned: one start a sequence, shape (batch, 1), so that
    sequences of different lengths share a batch. transformers' own sdpa_mask takes only one for all.
    """
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.long, device=device)[:, None, None, None]
    query = (q_offset + torch.arange(q_length, device=device))[:, None, :, None]
    key = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
    return mask_function(batch, head, query, key).expand(batch_size, 1, q_length, kv_length)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts_forward)
AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, _mask)
