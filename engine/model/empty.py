"""Building an architecture without memory for its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

#: Elements from which on uninitialized memory is not asked for. Buffers that a model computes are smaller, or filled.
_LARGE = 2**24


class _LargeOnMeta(TorchFunctionMode):
    """`torch.empty` of something large gives no memory.

    accelerate puts a parameter on `meta` after it was allocated. A layer's experts are one parameter, which a system
    refuses to give at all when it is larger than the memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and args and kwargs.get("device") is None:
            sizes = args[0] if isinstance(args[0], (tuple, list)) else args
            if math.prod(sizes) >= _LARGE:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `config`, parameters on `meta`, buffers real. Raises ValueError if there is none."""
    with _LargeOnMeta(), init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
