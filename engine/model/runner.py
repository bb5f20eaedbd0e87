"""Forward passes of the one module that is both target and draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.model.kv_cache import KVCache
from engine.model.seams import ATTENTION, NATIVE_ATTENTION, ExpertsModule, attach_backend


class Experts(Protocol):
    """Computes the routed experts of a layer: the offloaded originals, or the resident quantized copy."""

    def run(
        self, layer: int, module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden (rows, H), index and weights (rows, top_k) → (rows, H)."""


class ModelRunner:
    """Runs the model on a batch of ragged chunks, with either kind of experts.

    Attention, norms, routers, shared experts, embeddings and the KV cache are shared; only `experts`
    differs between a draft pass and a target pass. With `native_attention` the compiled kernel computes attention;
    whoever asks for it has loaded the kernels.
    """

    def __init__(
        self, model: PreTrainedModel, experts_modules: Sequence[torch.nn.Module], native_attention: bool = False
    ) -> None:
        self.model = model
        self.model.set_attn_implementation(NATIVE_ATTENTION if native_attention else ATTENTION)
        self.config = model.config.get_text_config()
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
        self._experts: Experts | None = None
        self._valid: torch.Tensor | None = None
        for layer, module in enumerate(experts_modules):
            attach_backend(module, self._backend(layer))

    def new_cache(self, sequences: int, max_length: int) -> KVCache:
        return KVCache(self.config.num_hidden_layers, sequences, max_length)

    # Not inference_mode: slots that are allocated during a pass are filled by the link's threads, outside of it.
    @torch.no_grad()
    def forward(
        self,
        cache: KVCache,
        experts: Experts | None,
        ids: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        rows: torch.Tensor,
        keep: int = 0,
    ) -> torch.Tensor:
        """One pass over ids (batch, width), sequence b at cache slot `slots[b]` from position `starts[b]`.

        Only the first `rows[b]` rows of sequence b are real; padding rows reach no expert.
        `experts` may be None for a model that was given no experts modules.
        `keep` limits the logits to the last so many rows (0 keeps all). Returns float32 logits (batch, kept, vocab).
        What goes in and what comes out lies in main memory, whatever device computes: tokens are chosen there.
        """
        width = ids.shape[1]
        positions = starts[:, None] + torch.arange(width)
        full = bool((rows == width).all())
        self._valid = None if full else (torch.arange(width) < rows[:, None]).flatten().to(self.device)
        self._experts = experts
        cache.begin(slots, starts)
        try:
            ids, positions = ids.to(self.device), positions.to(self.device)
            output = self.model(input_ids=ids, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=keep)
        finally:
            self._experts, self._valid = None, None
        return output.logits.float().cpu()

    def _backend(self, layer: int):
        def run(module: ExpertsModule, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor):
            assert self._experts is not None, "experts are computed inside forward() only"
            if self._valid is None:
                return self._experts.run(layer, module, hidden, index, weights)
            valid = self._valid
            out = torch.zeros_like(hidden)
            out[valid] = self._experts.run(layer, module, hidden[valid], index[valid], weights[valid])
            return out

        return run
