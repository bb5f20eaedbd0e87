"""Whether a model asks its cache, its attention or its experts for something that we do not have: asked before loading.

The model runs twice on tensors without data (`FakeTensorMode`): shapes flow through its own code, no weight is read.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.errors import ModelError, first_line
from engine.model.kv_cache import KVCache
from engine.model.seams import attach_backend, refuse_options

PROBE = "offload_probe"
#: (first position, rows) of each pass: a prompt, and a token behind it, which some models compute in another way.
PASSES = ((0, 3), (3, 1))


class _ShapeCache(KVCache):
    """The KV cache, but what it returns is made without asking which of its slots are meant."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        super().update(key_states, value_states, layer_idx)
        end = self.get_seq_length() + key_states.shape[2]
        return tuple(t.new_empty(*t.shape[:2], end, t.shape[3]) for t in (key_states, value_states))


def probe(model: PreTrainedModel, experts: list[torch.nn.Module]) -> None:
    """Run `model`, whose parameters are on `meta`, on shapes alone. Raises ModelError with what it lacks here.

    Models that decide by values (a rotary embedding that asks how long the text is) cannot be followed to the end:
    they are given the benefit of the doubt.
    """
    for module in experts:
        attach_backend(module, lambda module, hidden, index, weights: torch.empty_like(hidden))
    model.set_attn_implementation(PROBE)
    cache = _ShapeCache(model.config.get_text_config().num_hidden_layers, 1, sum(rows for _, rows in PASSES))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            weights = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
        for start, rows in PASSES:
            cache.begin(torch.tensor([0]), torch.tensor([start]))
            with mode, torch.no_grad():
                _forward(model, weights, cache, start, rows)
    except ModelError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(
            f"{type(model).__name__} does not run on this engine's KV cache ({first_line(error)}): choose another model"
        ) from error
    except (RuntimeError, NotImplementedError):
        return  # torch cannot follow without data; a pass with data will tell


def _forward(model: PreTrainedModel, weights: dict[str, torch.Tensor], cache: KVCache, start: int, rows: int) -> None:
    ids = torch.zeros(1, rows, dtype=torch.long)
    positions = torch.arange(start, start + rows)[None]
    inputs = {"input_ids": ids, "position_ids": positions, "cache": cache, "use_cache": True}
    torch.func.functional_call(model, weights, args=(), kwargs=inputs)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options,
) -> tuple[torch.Tensor, None]:
    """The shape of attention's result, after its options were looked at."""
    refuse_options(module, attention_mask, options)
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]), None


def _mask(batch_size: int, q_length: int, kv_length: int, **options) -> torch.Tensor:
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)


AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)
