"""From the dense model to a Mixtral on disk, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, MixtralConfig, PreTrainedConfig, PreTrainedModel

from engine.errors import Cancelled, UsageError
from engine.loading import Progress
from engine.model.new_checkpoint import ShardWriter, new_checkpoint
from engine.upcycle.base import Base, load_base
from engine.upcycle.recipe import Recipe
from engine.upcycle.routers import hidden_states, router, shares

#: The first tokens of the text, of which the routers are made: with 8 experts, about a thousand a cluster.
TOKENS = 8192
# Fewer rows than this for each cluster are no cluster.
ROWS_PER_EXPERT = 16
#: Mixtral's names of the dense model's three matrices.
MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def upcycle(
    base: str,
    out: Path,
    text: str,
    recipe: Recipe,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Make a Mixtral of the dense model `base` in the new directory `out`; returns what it is like.

    Sparse upcycling (arXiv 2212.05055): attention, norms and embeddings stay, each expert is a copy of its layer's
    feed-forward network. Here nothing is trained: seeded noise makes the experts differ, and the routers come from
    the hidden states of `text`. The top-k weights of a Mixtral add up to one, so without noise it computes what the
    dense model does. `progress(stage, done bytes, total bytes)`; total is 0 where it is not bytes.

    Raises UsageError when `out` exists or the text is too short, ModelError, CheckpointError, BudgetError;
    Cancelled when `cancelled()` turns true. `out` then does not exist.
    """
    progress = progress or (lambda stage, done, total: None)
    cancelled = cancelled or (lambda: False)
    if out.exists():
        raise UsageError(f"{out} exists already: choose another --out, or remove it")
    progress("loading the base", 0, 0)
    dense = load_base(base)
    config = mixtral_config(dense.model.config, recipe)
    report = _describe(dense.model, recipe)
    advice = "free some, or choose an --out on another disk"
    with new_checkpoint(out, report["bytes"], advice) as directory:
        routers, spread = _routers(dense, text, recipe, progress, cancelled)
        writer, written = ShardWriter(directory), 0
        for name, tensor in mixtral_tensors(dense.model, routers, recipe):
            if cancelled():
                raise Cancelled("upcycling was cancelled")
            writer.add(name, tensor)
            written += tensor.nbytes
            progress("writing the experts", written, report["bytes"])
        writer.finish()
        config.save_pretrained(directory)
        _endings(dense.model).save_pretrained(directory)
        dense.tokenizer.save_pretrained(directory)
    return {"model": str(out)} | report | spread


def mixtral_config(config: PreTrainedConfig, recipe: Recipe) -> MixtralConfig:
    """The Mixtral whose layers are those of the dense model but for the experts."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
        "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return MixtralConfig(
        **{name: getattr(config, name) for name in names},
        sliding_window=getattr(config, "sliding_window", None),
        num_local_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        architectures=["MixtralForCausalLM"],
        dtype=torch.bfloat16,
    )


def _endings(model: PreTrainedModel) -> GenerationConfig:
    """The ids that begin and end a text. How the base samples stays behind: not all that is read can be written."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(model.generation_config, name) for name in names})


def mixtral_tensors(
    model: PreTrainedModel, routers: list[torch.Tensor], recipe: Recipe
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor of the Mixtral, in bfloat16, by the names of Mixtral's own checkpoints."""
    generator = torch.Generator().manual_seed(recipe.seed)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if ".mlp." not in name and not (tied and name == "lm_head.weight"):
            yield name, tensor
    for number, (layer, weight) in enumerate(zip(model.model.layers, routers, strict=True)):
        block = f"model.layers.{number}.block_sparse_moe"
        yield f"{block}.gate.weight", weight
        for expert in range(recipe.experts):
            for name, matrix in MATRICES.items():
                weight = getattr(layer.mlp, matrix).weight
                yield f"{block}.experts.{expert}.{name}.weight", _noisy(weight, recipe.noise, generator)


@torch.no_grad()
def _noisy(weight: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
    exact = weight.float()
    return exact.add(torch.randn(weight.shape, generator=generator), alpha=noise * float(exact.std())).to(weight.dtype)


def _routers(
    dense: Base, text: str, recipe: Recipe, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """(each layer's router in bfloat16, how evenly they spread the text's tokens)."""
    ids = dense.tokenizer(text)["input_ids"][:TOKENS]
    if len(ids) < ROWS_PER_EXPERT * recipe.experts or len(set(ids)) < recipe.experts:
        raise UsageError(
            f"a text of {len(ids)} tokens, {len(set(ids))} of them different, is too short for {recipe.experts} "
            f"experts: use at least {ROWS_PER_EXPERT * recipe.experts} tokens"
        )
    states = hidden_states(
        dense.model, ids, lambda done, total: progress(f"reading the text: {done} of {total} tokens", 0, 0), cancelled
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    routers, least, most = [], 1.0, 0.0
    for number, hidden in enumerate(states, 1):
        if cancelled():
            raise Cancelled("upcycling was cancelled")
        progress(f"clustering: layer {number} of {len(states)}", 0, 0)
        routers.append(router(hidden, recipe.experts, generator).to(hidden.dtype))
        share = shares(hidden, routers[-1], recipe.top_k)
        least, most = min(least, float(share.min())), max(most, float(share.max()))
    return routers, {"text_tokens": len(ids), "least_share": least, "most_share": most}


def _describe(model: PreTrainedModel, recipe: Recipe) -> dict[str, Any]:
    config = model.config
    dense = sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * config.hidden_size * config.intermediate_size
    more = config.num_hidden_layers * ((recipe.experts - 1) * expert + recipe.experts * config.hidden_size)
    return {
        "layers": config.num_hidden_layers,
        "experts": recipe.experts,
        "top_k": recipe.top_k,
        "parameters": dense + more,
        "bytes": (dense + more) * torch.bfloat16.itemsize,
    }


def format_report(report: dict[str, Any]) -> str:
    """The report of `upcycle` as two lines."""
    return (
        f"{report['model']}: {report['parameters'] / 1e6:.0f} M weights, {report['bytes'] / 1e9:.2f} GB, "
        f"{report['layers']} layers of {report['experts']} experts, top-{report['top_k']}\n"
        f"over {report['text_tokens']} tokens of text an expert gets {report['least_share']:.1%} to "
        f"{report['most_share']:.1%} of its layer's choices"
    )
