"""Random checkpoints of a few hundred kilobytes, written by transformers, and what transformers makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

VOCAB = 300
EOS = 0
CONTEXT = 256

# Weights of this size give logits whose best two are far apart compared with float32 rounding.
_STD = 0.3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": _STD,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,
}

PROMPTS = (
    "Once upon a time",
    "The little frog was",
    "Tom had a red kite. He",
    "One day, a girl named Lily found a box in the garden. She wanted to",
    "a",
    "Hello!",
    "It was raining and",
    "Mom said:",
    "The cat and the dog were friends. They",
    "Ben liked to run",
    "In the big forest there lived an old bear who",
    "She smiled",
    "The sun",
    '"Can I play too?" asked',
    "They went home. The end.",
    "Sam saw a bird in the tree. The bird was blue. Sam",
    "One, two, three,",
    "caf\u00e9 \U0001f98a",
    "Why",
    "Every morning, the baker woke up early to make bread for the village, and",
)


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint: its directory, and the facts that tests need. `layers` counts MoE layers."""

    directory: Path
    layers: int
    experts: int
    top_k: int

    def reference(self) -> PreTrainedModel:
        """The model as transformers loads it, all in memory, in float32."""
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()


def mixtral_config(**changes) -> MixtralConfig:
    settings = {"intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 12, "num_experts_per_tok": 2}
    return MixtralConfig(**{**SIZES, **settings, "sliding_window": None, **changes})


def qwen3_moe_config(**changes) -> Qwen3MoeConfig:
    """With a dense first layer, so that MoE layers and layers are numbered differently."""
    settings = {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    }
    return Qwen3MoeConfig(**{**SIZES, **settings, **changes})


def olmoe_config(**changes) -> OlmoeConfig:
    settings = {"intermediate_size": 24, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 4}
    return OlmoeConfig(**{**SIZES, **settings, **changes})


def llama_config(**changes) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "intermediate_size": 48, "num_hidden_layers": 2, **changes})


CONFIGS = {"mixtral": mixtral_config, "qwen3_moe": qwen3_moe_config, "olmoe": olmoe_config}


def save_model(
    directory: Path,
    config: PreTrainedConfig,
    *,
    fused: bool = False,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> TinyModel:
    """Random weights in `directory`: one tensor an expert, or one for all experts of a layer (`fused`)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(directory, save_original_format=not fused, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(directory)
    config = config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
    layers = config.num_hidden_layers - len(getattr(config, "mlp_only_layers", None) or ())
    return TinyModel(directory, layers, experts, getattr(config, "num_experts_per_tok", 0))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly VOCAB tokens: an end of text, the 256 bytes, and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROMPTS * 3, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


@torch.no_grad()
def greedy(model: PreTrainedModel, directory: Path, prompts: tuple[str, ...], new_tokens: int) -> list[list[int]]:
    """What `generate(do_sample=False)` of transformers emits for each prompt on its own."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    emitted = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
        emitted.append(output[0, ids.shape[1] :].tolist())
    return emitted
