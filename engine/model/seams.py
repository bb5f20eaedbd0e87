"""The two places where the engine steps into a transformers model: its experts and its attention.

Both are registries of transformers (`ALL_EXPERTS_FUNCTIONS`, `AttentionInterface`); no modeling code is
copied or patched, so every router, norm, rotary embedding and shared expert stays transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import causal_mask_function

from engine.errors import ModelError
from engine.kernels.attention import chunked_attention, masked_attention
from engine.model.deferred import Deferred, plain
from engine.model.kv_cache import CachedStates

EXPERTS = "offload"
ATTENTION = "offload"
#: The same attention by the compiled kernel; `ModelRunner` chooses.
NATIVE_ATTENTION = "offload_native"


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


class ChunkMask(Deferred):
    """A mask that is causal, or causal within a window: all that the kernel needs of it.

    Row r of sequence b stands at starts[b] + r; `window` 0 is none. As a tensor it is the boolean mask.
    """

    def __init__(self, starts: torch.Tensor, window: int, make: Callable[[], torch.Tensor]) -> None:
        super().__init__(make)
        self.starts, self.window = starts, window


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | CachedStates,
    value: torch.Tensor | CachedStates,
    attention_mask: torch.Tensor | ChunkMask,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    refuse_options(module, attention_mask, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    mask = plain(attention_mask)
    return masked_attention(query, plain(key), plain(value), mask, scale, s_aux).contiguous(), None


def native_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | CachedStates,
    value: torch.Tensor | CachedStates,
    attention_mask: torch.Tensor | ChunkMask,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The same by the kernel, which reads the cache where it lies; masks that it does not know are left to torch."""
    if not isinstance(attention_mask, ChunkMask):
        return _attention_forward(module, query, key, value, attention_mask, scaling, s_aux, **kwargs)
    refuse_options(module, attention_mask, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if isinstance(key, CachedStates) and isinstance(value, CachedStates):
        keys, values, slots = key.storage, value.storage, key.slots
    else:
        # What the model made of the cache has one entry a sequence, in their order.
        keys, values, slots = plain(key), plain(value), torch.arange(query.shape[0])
    query, keys, values = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, keys, values))
    sinks = None if s_aux is None else s_aux.detach().float()
    return chunked_attention(
        query, keys, values, slots, attention_mask.starts, scale, attention_mask.window, sinks
    ), None


def refuse_options(module: torch.nn.Module, mask: torch.Tensor | ChunkMask | None, options: dict[str, Any]) -> None:
    """Raise ModelError when a model asks for attention that neither implementation here computes."""
    for name in ("softcap", "sinks", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(f"attention with {name} is not supported yet ({type(module).__name__})")
    if mask is None:
        raise ModelError(f"attention without a mask is not supported yet ({type(module).__name__})")


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset,
    kv_offset: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    device=None,
    **kwargs,
) -> torch.Tensor | ChunkMask:
    """Which keys each row sees: a `ChunkMask` where the rule is one that it knows, else a boolean (batch, 1, q, kv).

    `q_offset` is what `KVCache.get_query_offset` returned: one start a sequence, shape (batch, 1), so that
    sequences of different lengths share a batch. transformers' own sdpa_mask takes only one for all.
    """
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.long, device=device)[:, None, None, None]
    query = (q_offset + torch.arange(q_length, device=device))[:, None, :, None]

    def sees(key: torch.Tensor) -> torch.Tensor:
        return mask_function(batch, head, query, key)

    def dense() -> torch.Tensor:
        key = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
        return sees(key).expand(batch_size, 1, q_length, kv_length)

    window = local_size or 0
    if mask_function is causal_mask_function or _is_band(sees, query, kv_length, window):
        return ChunkMask(q_offset[:, 0], window, dense)
    return dense()


def _is_band(sees: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor, kv_length: int, window: int) -> bool:
    """Whether each row sees exactly the last `window` keys up to its own (0: all), judged where such masks differ.

    The edges of the window, the row itself and the key behind it, for every row: a chunked mask looks like a
    window from the last row of a chunk, but from no other.
    """
    edges = [torch.zeros_like(query), query // 2, query, query + 1]
    edges += [query - window, query - window + 1] if window else []
    key = torch.cat(edges, dim=-1).clamp(0, kv_length - 1)
    expected = key <= query
    if window:
        expected &= key > query - window
    return torch.equal(sees(key).expand_as(expected), expected)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts_forward)
AttentionInterface.register(ATTENTION, _attention_forward)
AttentionInterface.register(NATIVE_ATTENTION, native_attention)
AttentionMaskInterface.register(ATTENTION, _mask)
AttentionMaskInterface.register(NATIVE_ATTENTION, _mask)
