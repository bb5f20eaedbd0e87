"""The dense model to start from: a directory, a hub id or a GGUF file, refused before its weights are read."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.errors import CheckpointError, ModelError, first_line
from engine.model.checkpoint import Checkpoint, resolve_directory
from engine.model.text import load_tokenizer

#: Architectures that are Mixtral's but for the feed-forward network.
FAMILY = ("llama", "mistral")
GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class Base:
    """A dense model in bfloat16, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_base(base: str) -> Base:
    """Load a model whose feed-forward networks can be made experts.

    Raises ModelError when it is not of the Llama family or nothing is there, CheckpointError when files of it are
    missing or damaged.
    """
    if base.lower().endswith(".gguf"):
        path = Path(base).expanduser()
        _check_gguf(path)
        directory, gguf = path.parent, {"gguf_file": path.name}
    else:
        directory, gguf = resolve_directory(base), {}
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, **gguf)
    except Exception as error:  # a damaged file fails in many ways
        raise ModelError(f"transformers cannot read the config of {base}: {first_line(error)}") from error
    check_config(config)
    if not gguf:
        Checkpoint.open(directory)
    tokenizer = load_tokenizer(directory, **gguf)
    return Base(_load_weights(base, directory, gguf), tokenizer)


def check_config(config: PreTrainedConfig) -> None:
    """Raises ModelError when a Mixtral with experts of this model's shape would compute something else."""
    kind = config.model_type
    if kind not in FAMILY:
        raise ModelError(f"a {kind} model cannot become a Mixtral: choose a dense one of type {' or '.join(FAMILY)}")
    reasons = [f"its activation is {config.hidden_act}, not silu"] if config.hidden_act != "silu" else []
    for name, what in (("attention_bias", "its attention has biases"), ("mlp_bias", "its MLP has biases")):
        if getattr(config, name, False):
            reasons.append(what)
    if getattr(config, "quantization_config", None) is not None:
        reasons.append("its weights are quantized")
    if reasons:
        raise ModelError(f"this {kind} model cannot become a Mixtral: {', '.join(reasons)}")


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: fetch it again")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"reading {path.name} needs the gguf package: pip install gguf")


def _load_weights(base: str, directory: Path, gguf: dict[str, str]) -> PreTrainedModel:
    unpack: dict[str, Any] = {**gguf, "quantization_config": GgufConfig(dequantize=True)} if gguf else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True, **unpack
        )
    except Exception as error:  # transformers and gguf raise whatever the damage leads to
        raise CheckpointError(f"cannot load {base} ({first_line(error)}): fetch it again") from error
    model, info = loaded
    absent = sorted(info["missing_keys"])
    if absent:
        raise CheckpointError(f"{base} lacks {absent[0]}: incomplete download? Fetch it again")
    return model.eval()
