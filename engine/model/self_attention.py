"""Which attention modules the one-call kernel stands in for: those that compute exactly what it computes.

A pass of one token spends more time between kernels than in them: in a decoder layer's attention, on Python and some
twenty small operations of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from engine.kernels.attention import band
from engine.kernels.linear import KernelWeight, in_large_pages
from engine.kernels.norm import KernelNorm
from engine.kernels.self_attention import AttentionWeights, project, self_attention
from engine.kernels.shared import use_kernels
from engine.model.kv_cache import KVCache
from engine.model.seams import ChunkMask, native_attention

SHOWN = "offload_shown"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
# Rows on which a module shows what it computes, behind how many others, and where in a text they are said to stand.
_ROWS, _BEFORE, _POSITION = 3, 5, 1_000_003
# Sizes of inputs: with the large ones whatever clips or bends them shows.
_SCALES = (1.0, 1e3)

Angles = tuple[torch.Tensor, torch.Tensor]


class KernelAttention:
    """Stands in for the `forward` of an attention module, and leaves to it what the kernel does not know."""

    def __init__(self, module: Any, weights: AttentionWeights) -> None:
        self._own, self._layer, self.dim = module.forward, module.layer_idx, module.head_dim
        self.kv_heads = module.k_proj.out_features // self.dim
        self._weights = weights

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: torch.Tensor | ChunkMask | None = None,
        cache: KVCache | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(attention_mask, ChunkMask) or not isinstance(cache, KVCache) or position_embeddings is None:
            return self._own(hidden_states, position_embeddings, attention_mask, cache=cache, **options)
        keys, values = cache.storage(self._layer, hidden_states, self.kv_heads, self.dim)
        return self_attention(
            hidden_states.contiguous(), self._weights, *position_embeddings, keys, values, cache.slots,
            attention_mask.starts, attention_mask.window,
        ), None  # fmt: skip


def use_shared_kernels(model: PreTrainedModel, kernels: frozenset[str]) -> None:
    """Let those of KERNELS that `kernels` names compute what is no expert, wherever they compute what `model` does."""
    if "linear" in kernels:
        use_kernels(model)
        if "attention" in kernels:
            use_self_attention_kernel(model)


def use_self_attention_kernel(model: PreTrainedModel) -> None:
    """Let the kernel compute the attention of `model`, whose linear layers and norms the kernels compute already.

    A module keeps its own `forward` unless that gives what the kernel gives with the module's own weights: latent
    attention, gates, sinks, interleaved rotations, clipped or position-dependent queries stay transformers'.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    modules = [module for module in model.modules() if _has_the_parts(module)]
    if rotary is None or not modules:
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(SHOWN)
    try:
        for module in modules:
            kernel = _kernel_attention(module, rotary)
            if kernel is not None:
                module.forward = kernel
            vars(module).pop("offload_shown", None)
    finally:
        model.set_attn_implementation(before)


def _has_the_parts(module: Any) -> bool:
    """Four linear layers that the kernels compute, norms that they compute, and nothing else."""
    children = dict(module.named_children())
    if not set(_PROJECTIONS) <= set(children) <= {*_PROJECTIONS, *_NORMS} or module._parameters:
        return False
    projections = [children[name] for name in _PROJECTIONS]
    if not all(type(p) is torch.nn.Linear and isinstance(p.weight, KernelWeight) for p in projections):
        return False
    if not all(isinstance(vars(children[name]).get("forward"), KernelNorm) for name in _NORMS if name in children):
        return False
    dim = getattr(module, "head_dim", None)
    if not isinstance(dim, int) or not isinstance(getattr(module, "layer_idx", None), int):
        return False
    *into, out = projections
    sizes = [p.out_features for p in into]
    return (
        sizes[1] == sizes[2]
        and sizes[0] == out.in_features
        and not any(size % dim for size in sizes)
        and len({p.bias is None for p in into}) == 1
        and len({p.weight.dtype for p in projections}) == 1
    )


@dataclass(frozen=True)
class _Shown:
    """What a module made of an input: its output, the keys and values that it wrote, and what it asked of attention."""

    out: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    scale: float


@torch.no_grad()
def _kernel_attention(module: Any, rotary: torch.nn.Module) -> KernelAttention | None:
    try:
        inputs = [_input(module, rotary, scale) for scale in _SCALES]
        own = [_show(module, module.forward, *given) for given in inputs]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None  # it wants to be called in another way
    if any(angles[0].dtype != x.dtype for x, angles in inputs):
        return None
    weights = _weights(module, own[0].scale)
    kernel = KernelAttention(module, weights)
    for (x, angles), expected, scale in zip(inputs, own, _SCALES, strict=True):
        projected = project(x, weights, *angles, kernel.kv_heads, kernel.dim)
        query, keys, values = (part.transpose(1, 2) for part in projected)
        pairs = [(query, expected.query), (keys, expected.keys), (values, expected.values)]
        if scale == 1.0:
            # With large inputs the softmax takes one key, and a rounding decides which.
            pairs.append((_show(module, kernel, x, angles).out, expected.out))
        if not all(_close(*pair) for pair in pairs):
            return None
    return kernel


def _weights(module: Any, scale: float) -> AttentionWeights:
    """The module's weights, its three projections one below the other; the module keeps views of them."""
    into, out = [module.q_proj, module.k_proj, module.v_proj], module.o_proj
    qkv = in_large_pages(torch.cat([p.weight.data for p in into]))
    for projection, part in zip(into, qkv.split([p.out_features for p in into]), strict=True):
        projection._parameters["weight"] = KernelWeight(part, requires_grad=False)
    norms: list[KernelNorm | None] = [
        module.get_submodule(name).forward if hasattr(module, name) else None for name in _NORMS
    ]
    return AttentionWeights(
        qkv,
        None if into[0].bias is None else torch.cat([p.bias.data for p in into]),
        q_norm=None if norms[0] is None else norms[0].weight,
        k_norm=None if norms[1] is None else norms[1].weight,
        eps=next((norm.eps for norm in norms if norm is not None), 0.0),
        out=out.weight.data,
        out_bias=None if out.bias is None else out.bias.data,
        scale=scale,
    )


def _input(module: Any, rotary: torch.nn.Module, scale: float) -> tuple[torch.Tensor, Angles]:
    weight = module.q_proj.weight
    noise = torch.randn(1, _ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    x = (noise * scale).to(weight.dtype)
    # A copy, because some remember the longest text that they have seen.
    return x, deepcopy(rotary)(x, _positions())


def _positions() -> torch.Tensor:
    return torch.arange(_POSITION, _POSITION + _ROWS)[None]


def _show(module: Any, forward: Callable[..., Any], x: torch.Tensor, angles: Angles) -> _Shown:
    """Run `forward` behind an empty text. Raises AttributeError when the module did not ask `SHOWN`."""
    cache = KVCache(module.layer_idx + 1, 1, _BEFORE + _ROWS)
    cache.begin(torch.tensor([0]), torch.tensor([_BEFORE]))
    mask = ChunkMask(cache.starts, 0, lambda: band(cache.starts, _ROWS, _BEFORE + _ROWS))
    out, _ = forward(
        hidden_states=x, position_embeddings=angles, attention_mask=mask, cache=cache, position_ids=_positions(),
        use_cache=True,
    )  # fmt: skip
    keys, values = (t[:, :, _BEFORE:] for t in cache.storage(module.layer_idx, x, 0, 0))
    return _Shown(out, keys, values, *module.offload_shown)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to a few roundings of the largest."""
    tolerance = 2.0**-6 if b.dtype == torch.bfloat16 else 1e-4
    a, b = a.float(), b.float()
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())


def _show_attention(module: Any, query: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """The engine's attention, which leaves with the module what it was asked."""
    if options.get("s_aux") is not None:
        raise ValueError("sinks")
    module.offload_shown = query, options.get("scaling") or query.shape[-1] ** -0.5
    return native_attention(module, query, *args, **options)


AttentionInterface.register(SHOWN, _show_attention)
