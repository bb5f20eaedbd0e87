"""A small causal language model that drafts for the target: all of it in fast memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from engine.errors import CheckpointError, ModelError, first_line
from engine.model.architecture import build_model
from engine.model.probe import probe
from engine.model.runner import ModelRunner
from engine.model.self_attention import use_shared_kernels
from engine.model.text import load_tokenizer
from engine.model.vocabulary import check_vocabulary, tokens_by_id


@dataclass(frozen=True)
class DraftModel:
    """What a drafter needs of it: `vocab` rows of its output head, `context` positions (None: no limit), and bytes."""

    runner: ModelRunner
    vocab: int
    context: int | None
    weight_nbytes: int
    kv_nbytes_per_token: int


def load_draft_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    target: PreTrainedTokenizerBase,
    kernels: frozenset[str],
) -> DraftModel:
    """Load a checkpoint of any architecture with attention in every layer, dense or not, in `dtype` onto `device`.

    `target` is the tokenizer whose ids it must share; `kernels` names those of KERNELS that compute here. Raises
    ModelError before any weight is read when it cannot draft for this target, CheckpointError when weights lack.
    """
    empty = build_model(directory, dtype)
    tokenizer = load_tokenizer(directory)
    check_vocabulary(target, tokenizer, f"the draft model {directory.name}")
    config = empty.config.get_text_config()
    largest = max(tokens_by_id(target))
    if config.vocab_size <= largest:
        raise ModelError(
            f"the draft model {directory.name} has {config.vocab_size} embeddings, but token {largest} exists: files "
            "of two models?"
        )
    probe(empty, [])
    model = _load(directory, dtype, device)
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    use_shared_kernels(model, kernels)
    runner = ModelRunner(model, [], native_attention="attention" in kernels)
    context = getattr(config, "max_position_embeddings", None)
    return DraftModel(runner, config.vocab_size, context, sum(weights.values()), _kv_nbytes(runner))


def _load(directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {directory.name}: {first_line(error)}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        # transformers would draft with random weights in their place.
        raise CheckpointError(f"{directory.name} lacks {missing[0]}: incomplete download? Fetch it again")
    return model.to(device).eval()


def _kv_nbytes(runner: ModelRunner) -> int:
    """Bytes of keys and values a token, by reading one."""
    cache = runner.new_cache(1, 1)
    zero, one = torch.tensor([0]), torch.tensor([1])
    runner.forward(cache, None, torch.tensor([[0]]), zero, zero, one)
    return cache.nbytes
