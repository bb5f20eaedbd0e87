"""The architecture that a config names, with its experts and attention set to ours, or the reason why it cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import moe

from engine.errors import ModelError, first_line
from engine.model.checkpoint import DTYPES
from engine.model.empty import build_empty
from engine.model.ffn import DOWN
from engine.model.probe import probe
from engine.model.seams import EXPERTS

#: Kinds of layers whose memory of the text is keys and values by position, or that have none.
_BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention", "moe", "dense", "sparse"}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


def build_architecture(directory: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, torch.nn.Module]]:
    """The model without weights, on `meta`, and its experts modules by name.

    Raises ModelError for what is no Mixture-of-Experts model and for what cannot run here. Reads the config only.
    """
    model = build_model(directory, dtype)
    if not model._can_set_experts_implementation():
        raise _no_experts(model.config, directory)
    model.set_experts_implementation(EXPERTS)
    modules = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not modules:
        raise _no_experts(model.config, directory)
    _check_gates(modules)
    probe(model, list(modules.values()))
    return model, modules


def build_model(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model without weights, on `meta`. Raises ModelError for what cannot run here."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json: give a directory that transformers can load")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"transformers cannot read the config of {directory}: {first_line(error)}") from error
    _check_config(config)
    try:
        model = build_empty(config, dtype)
    except ValueError as error:
        raise ModelError(f"transformers has no causal language model for {config.model_type}") from error
    return model.eval()


def _check_config(config: PreTrainedConfig) -> None:
    """Raise ModelError for what the config alone rules out."""
    if config.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder: choose a decoder-only language model")
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ModelError(f"the checkpoint is quantized ({method}): use one in {', '.join(DTYPES)}, or in MXFP4")
    foreign = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _BY_POSITION
    for reason, kinds in (
        ("keep a state that cannot be taken back after a rejected draft", foreign & _RECURRENT),
        ("keep more than keys and values by position, all that the KV cache here has room for", foreign),
    ):
        if kinds:
            raise ModelError(
                f"{config.model_type} has layers of type {', '.join(sorted(kinds))}, which {reason}: choose a model "
                "with plain attention in every layer"
            )


def _no_experts(config: PreTrainedConfig, directory: Path) -> ModelError:
    text = config.get_text_config()
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERT_COUNTS):
        return ModelError(
            f"transformers' {config.model_type} does not route its experts through the experts interface: "
            "choose another model"
        )
    return ModelError(
        f"{directory.name} ({config.model_type}) is not a Mixture-of-Experts model: choose one with routed experts"
    )


def _is_experts(module: torch.nn.Module) -> bool:
    """True for a class that `use_experts_implementation` decorated (it sets these attributes)."""
    return hasattr(module, "is_transposed") and hasattr(module, "is_concatenated") and hasattr(module, DOWN)


def _check_gates(modules: dict[str, Any]) -> None:
    """Raise ModelError for interleaved gate and up that the module does not take apart itself."""
    for name, module in modules.items():
        if module.has_gate and not module.is_concatenated and type(module)._apply_gate is moe._default_apply_gate:
            raise ModelError(f"the experts of {name} interleave gate and up, but say nothing of how to split them")
