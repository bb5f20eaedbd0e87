"""A model large enough to measure where no hub is at hand: the shape of a real one, with random weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, MixtralConfig

from engine.config import EMBEDDED_MODEL, EngineConfig, cache_directory
from engine.model.new_checkpoint import SHARD, new_checkpoint

#: What `--model` calls it.
RANDOM_MODEL = "random-8x135m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# The page-aligned pack of the experts will lie beside it.
COPIES = 2


def random_config() -> MixtralConfig:
    """SmolLM2-135M, sparsely upcycled eightfold: 692 M weights, 1.4 GB in bfloat16.

    The embedded model's tokenizer goes with it; ids beyond its vocabulary have no text. At this size of weights an
    INT4 draft is accepted about as often as a trained model's: 75 to 95 % a token. At 0.06 it never is.
    """
    return MixtralConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=8192,
        sliding_window=None,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def with_random_model(config: EngineConfig, say: Callable[[str], None]) -> EngineConfig:
    """The configuration with the directory of RANDOM_MODEL, if that is its model. Raises as `random_model`."""
    return replace(config, model=str(random_model(say))) if config.model == RANDOM_MODEL else config


def random_model(say: Callable[[str], None]) -> Path:
    """The directory of RANDOM_MODEL; writes it on the first call. Raises BudgetError when the disk is too full."""
    directory = cache_directory() / "models" / RANDOM_MODEL
    if not directory.is_dir():
        say(f"writing {RANDOM_MODEL} to {directory}, once")
        save_random_model(directory, random_config())
    return directory


def save_random_model(directory: Path, config: MixtralConfig) -> None:
    """Write a checkpoint with seeded random weights in bfloat16, in shards; complete, or not at all.

    Raises BudgetError when the disk has no room for it and its pack.
    """
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    need = COPIES * weights * torch.bfloat16.itemsize
    advice = "free some, or set SPECVIZ_CACHE to a directory on another disk"
    with new_checkpoint(directory, need, advice) as partial:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
        model.save_pretrained(partial, max_shard_size=SHARD)
        for name in TOKENIZER_FILES:
            shutil.copyfile(EMBEDDED_MODEL / name, partial / name)
