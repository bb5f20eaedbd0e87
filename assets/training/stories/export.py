"""Write a trained model as a standard transformers checkpoint, and prove that it is the same model."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from model import Trainee
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

SHARD = "8MB"  # so that no file of the repository grows past 10 MB
TOLERANCE = 1e-3


@torch.no_grad()
def export(model: Trainee, tokenizer: PreTrainedTokenizerFast, out: Path, sample: torch.Tensor) -> float:
    """Saves `model` in bfloat16 under `out`, with its tokenizer.

    Loads what was written as anybody would, and compares float32 logits on `sample` (windows, tokens)
    with those of the training code. Returns the largest difference; raises RuntimeError above TOLERANCE.
    """
    lm = copy.deepcopy(model.lm).to(torch.bfloat16)
    lm.generation_config.bos_token_id = lm.generation_config.eos_token_id = lm.config.eos_token_id
    lm.generation_config.pad_token_id = lm.config.pad_token_id
    lm.save_pretrained(out, max_shard_size=SHARD)
    tokenizer.save_pretrained(out)

    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ours = Trainee(lm.config, capacity=float("inf")).eval()  # no token may lose an expert here
    ours.lm.load_state_dict(lm.float().state_dict())  # what was saved, not what was trained
    difference = (loaded(sample).logits - ours(sample)[0]).abs().max().item()
    if difference > TOLERANCE:
        raise RuntimeError(f"the exported model's logits differ by {difference:.2g} from the trained one's")
    return difference
