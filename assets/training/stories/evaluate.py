"""Measure a checkpoint: held-out loss, how evenly its experts are used, and whether greedy text loops.

    python assets/training/stories/evaluate.py assets/models/stories-moe

Prints one JSON object. The held-out loss of a model is fair only if it was trained without the last
twelfth of `real.txt.xz`, as train.py does.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import held_out_ids, read_real, split_real
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = (
    "Once upon a time, there was a little girl named Lily who",
    "Tom had a red kite.",
    "The little frog was",
    '"Can I have a cookie?" asked',
    "One day, a big dog",
    "Sara and Ben are friends. They like to",
    "It was raining, and the cat",
    "Max found a shiny key under",
    "The moon was bright. A small owl",
    'Mom said, "Let\'s bake a cake."',
)
PHRASE, OFTEN = 8, 3  # text loops when a phrase of 8 tokens comes 3 times


def loops(tokens: list[int]) -> bool:
    """Whether some run of PHRASE tokens occurs OFTEN times."""
    counts = Counter(tuple(tokens[i : i + PHRASE]) for i in range(len(tokens) - PHRASE + 1))
    return max(counts.values(), default=0) >= OFTEN


@torch.inference_mode()
def held_out(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, window: int) -> dict[str, Any]:
    """Loss in nats a token and bits a byte (comparable between tokenizers), and each layer's expert load.

    `load` has (least, most) used expert of each layer, as a multiple of an even share.
    """
    rows = held_out_ids(split_real(read_real())[1], tokenizer, window)
    experts = model.config.num_experts
    counts = torch.zeros(model.config.num_hidden_layers, experts)

    def count(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
            counts[layer] += torch.bincount(outputs[2].flatten(), minlength=experts)

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(count(i)) for i, layer in enumerate(model.model.layers)]
    nats = 0.0
    for ids in rows.split(8):
        logits = model(ids, use_cache=False).logits
        nats += F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    for hook in hooks:
        hook.remove()
    predicted = rows[:, 1:]
    size = sum(len(text.encode()) for text in tokenizer.batch_decode(predicted, skip_special_tokens=True))
    load = counts / counts.mean(-1, keepdim=True)
    return {
        "held_out_loss": round(nats / predicted.numel(), 4),
        "bits_per_byte": round(nats / math.log(2) / size, 4),
        "tokens": predicted.numel(),
        "load": [[round(layer.min().item(), 2), round(layer.max().item(), 2)] for layer in load],
    }


@torch.inference_mode()
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int) -> dict[str, Any]:
    """The model's likeliest continuation of `prompt`, and whether it loops."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    output = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0].tolist()
    return {"text": tokenizer.decode(output, skip_special_tokens=True), "loops": loops(output[ids.shape[1] :])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a checkpoint of the story model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--window", type=int, default=512, help="tokens of context for the loss")
    parser.add_argument("--new-tokens", type=int, default=120)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    report = held_out(model, tokenizer, options.window)
    report["greedy"] = [greedy(model, tokenizer, prompt, options.new_tokens) for prompt in PROMPTS]
    report["loops"] = sum(sample["loops"] for sample in report["greedy"])
    print(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
