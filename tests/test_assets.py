"""The embedded model: that anybody can load it, and that it is what its card says."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "assets" / "models" / "stories-moe"
CORPUS = ROOT / "assets" / "training" / "stories"
MIB = 2**20


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def card():
    return (MODEL / "README.md").read_text()


@pytest.fixture(scope="module")
def sample(tokenizer):
    """About 2,000 tokens of stories, each behind an EOT."""
    text = lzma.decompress((CORPUS / "real.txt.xz").read_bytes()).decode()
    stories = re.split(r"(?<!\n)\n(?!\n)", text)[-8:]
    return [torch.tensor([tokenizer(story)["input_ids"]]) for story in stories if len(story) > 100]


def test_is_a_plain_transformers_checkpoint(model):
    assert type(model).__module__ == "transformers.models.qwen3_moe.modeling_qwen3_moe"
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_038_912
    config = model.config
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 16, 2)


def test_shards_hold_what_the_index_promises():
    index = json.loads((MODEL / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {path.name for path in MODEL.glob("*.safetensors")}
    assert all((MODEL / name).stat().st_size < 10 * 10**6 for name in files)


def test_tokenizer_round_trips(tokenizer):
    for text in ("Once upon a time, there was a little girl.", "naïve 你好 🙂 \t\n", "\u202e${x}`<img>`</script>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0


def test_reads_stories_far_better_than_noise(model, sample):
    ids = sample[0]
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    with torch.inference_mode():
        story, noise = (model(row, labels=row).loss.item() for row in (ids, shuffled))
    assert story < 3.5 < 5 < noise


def test_every_expert_is_used_about_as_evenly_as_the_card_says(model, sample, card):
    counts = torch.zeros(8, 16)

    def count(layer):
        def hook(_module, _inputs, outputs):
            counts[layer] += outputs[2].flatten().bincount(minlength=16)

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(count(i)) for i, layer in enumerate(model.model.layers)]
    with torch.inference_mode():
        for ids in sample:
            model(ids)
    for hook in hooks:
        hook.remove()
    assert counts.sum() == 8 * 2 * sum(ids.numel() for ids in sample)
    load = counts / counts.mean(-1, keepdim=True)
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \|$", card, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(8))
    for layer, least, most in rows:
        assert load[int(layer)].min() > 0
        assert load[int(layer)].min() == pytest.approx(float(least), abs=0.3)
        assert load[int(layer)].max() == pytest.approx(float(most), abs=0.6)


def test_card_says_where_it_came_from_and_what_it_is_not(card):
    front = card.split("---")[1]
    assert re.search(r"^license: apache-2.0$", front, re.MULTILINE)
    for words in (
        "CDLA-Sharing-1.0",
        "SmolLM2-135M-Instruct",
        "assets/training/stories/train.py",
        "AutoModelForCausalLM",
        "Intended use",
        "Limits",
        "held-out loss",
    ):
        assert words in card
    assert (ROOT / "assets/training/stories/train.py").is_file()


def test_card_shows_samples_that_the_model_really_writes(model, tokenizer, card):
    samples = re.findall(r"^> \*\*(.+?)\*\* (.+)$", card, re.MULTILINE)
    assert samples
    for prompt, rest in samples:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        written = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert " ".join(rest.split()).startswith(" ".join(written.split())[:60])
