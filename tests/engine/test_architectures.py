"""No modeling code is copied: architectures that nobody named here work through the same two seams, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_families import REFUSED, WORKING, family_config, save_family, save_mxfp4
from tiny_models import EOS, PROMPTS, TinyModel, greedy, mixtral_config, save_model
from transformers import Gemma4Config

from engine.config import CacheBudget, EngineConfig, GenerationConfig, parse_kernels
from engine.engine import Engine
from engine.errors import ModelError
from engine.model.checkpoint import Checkpoint
from engine.model.empty import build_empty
from engine.model.probe import probe
from engine.model.seams import EXPERTS
from engine.model.skeleton import load_skeleton

#: As if every kind of layer were known to keep keys and values only.
ATTENTION_LAYERS = {"full_attention", "linear_attention", "indexed_attention"}


def check(
    model: TinyModel,
    prompts: tuple[str, ...] = PROMPTS[:4],
    new_tokens: int = 12,
    expected: list[list[int]] | None = None,
) -> None:
    """Ragged batch with drafts, and plain decoding alone, both with few slots."""
    expected = expected or greedy(model.reference(), model.directory, prompts, new_tokens)
    engine = Engine.load(EngineConfig(model=str(model.directory), cache=CacheBudget(slots=2)))
    try:
        together = engine.generate(list(prompts), GenerationConfig(max_new_tokens=new_tokens, k=4))
        assert [result["token_ids"] for result in together] == expected
        alone = engine.generate([prompts[-1]], GenerationConfig(max_new_tokens=new_tokens, k=0))
        assert alone[0]["token_ids"] == expected[-1]
    finally:
        engine.close()


@pytest.mark.parametrize("name", WORKING)
def test_works_and_says_the_same(name: str, tmp_path):
    """From the layout that the family is published in, and from the one that transformers holds in memory."""
    published = save_family(name, tmp_path / "published")
    expected = greedy(published.reference(), published.directory, PROMPTS[:4], 12)
    check(published, expected=expected)
    fused = save_family(name, tmp_path / "fused", fused=True)
    if set(Checkpoint.open(fused.directory).tensors) != set(Checkpoint.open(published.directory).tensors):
        check(fused, expected=expected)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_a_reason_before_any_weight_is_there(name: str, tmp_path):
    """The directory holds a config and nothing else."""
    options, reason = REFUSED[name]
    family_config(name, options).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refusal:
        Engine.load(EngineConfig(model=str(tmp_path)))
    assert "\n" not in str(refusal.value)


def test_a_sliding_window_forgets_at_the_same_place(tmp_path):
    """Prompts and texts go well past the window of 8, and the window matters: without it the text is another."""
    prompts = (PROMPTS[3], PROMPTS[15], PROMPTS[19], PROMPTS[4])
    windowed = save_model(tmp_path / "windowed", mixtral_config(sliding_window=8))
    whole = save_model(tmp_path / "whole", mixtral_config())
    texts = [greedy(model.reference(), model.directory, prompts, 24) for model in (windowed, whole)]
    assert texts[0] != texts[1]
    check(windowed, prompts, new_tokens=24)


def test_a_prompt_longer_than_a_prefill_pass(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.engine.PREFILL_ROWS", 7)
    check(save_model(tmp_path, mixtral_config(sliding_window=8)), (PROMPTS[3] * 3, PROMPTS[19], "a"))


def test_next_layer_prediction_asks_the_layers_own_router(tiny_model):
    """`guess` for the hidden states that a router sees itself is what that router chose."""
    model = tiny_model("qwen3_moe")
    engine = Engine.load(EngineConfig(model=str(model.directory), prefetch="next-layer"))
    routed: Callable = engine.passes.routed
    compared = []

    def compare(layer, index, weights, hidden):
        guess, gates = engine.loaded.router_probe.guess(layer, hidden)
        assert guess == index
        assert gates == [pytest.approx(row, abs=1e-5) for row in weights]
        compared.append(layer)
        routed(layer, index, weights, hidden)

    engine.passes.routed = compare
    try:
        engine.generate([PROMPTS[0]], GenerationConfig(max_new_tokens=6, k=2))
    finally:
        engine.close()
    assert set(compared) == {0, 1}


def test_the_skeleton_leaves_the_experts_on_disk(tiny_model):
    skeleton = load_skeleton(tiny_model("qwen3_moe").directory, torch.float32)
    experts = [p for module in skeleton.experts_modules for p in module.parameters()]
    assert experts and all(parameter.is_meta for parameter in experts)
    here = {id(parameter) for parameter in experts}
    shared = [p for p in skeleton.model.parameters() if id(p) not in here]
    assert not any(parameter.is_meta for parameter in shared)
    assert skeleton.shared_bytes == sum(p.numel() * 4 for p in shared)


@pytest.mark.parametrize("kernels", ("all", "none"))
@pytest.mark.parametrize("name", ("GptOssConfig", "AriaTextConfig"))
def test_transposed_experts_need_no_pack(name: str, kernels: str, tmp_path):
    """Slots then hold the matrices as they lie on disk, for torch and for the kernels."""
    model = save_family(name, tmp_path)
    expected = greedy(model.reference(), model.directory, PROMPTS[:3], 12)
    config = EngineConfig(model=str(tmp_path), cache=CacheBudget(slots=2), pack=False, kernels=parse_kernels(kernels))
    engine = Engine.load(config)
    try:
        assert engine.loaded.source.table.shape.transposed
        together = engine.generate(list(PROMPTS[:3]), GenerationConfig(max_new_tokens=12, k=4))
        assert [result["token_ids"] for result in together] == expected
    finally:
        engine.close()


@pytest.mark.parametrize("name", ("MiniMaxConfig", "DeepseekV32Config"))
def test_what_a_config_does_not_tell_a_probe_finds(name: str, tmp_path, monkeypatch):
    """Attention in every layer by its config, but a cache of its own; an index whose kind of layer nobody knows yet."""
    options = REFUSED[name][0] | ({"layer_types": ["full_attention"] * 2} if name == "MiniMaxConfig" else {})
    family_config(name, options).save_pretrained(tmp_path)
    monkeypatch.setattr("engine.model.architecture._BY_POSITION", ATTENTION_LAYERS)
    with pytest.raises(ModelError, match="cache of its own|index of its own") as refusal:
        Engine.load(EngineConfig(model=str(tmp_path)))
    assert "\n" not in str(refusal.value)


def test_a_probe_finds_attention_that_we_do_not_compute():
    """Gemma 2 caps its attention scores (and has no experts: it is asked past the check for those)."""
    model = build_empty(family_config("Gemma2Config", {"head_dim": 8}), torch.float32)
    with pytest.raises(ModelError, match="softcap is not supported"):
        probe(model, [])


def test_asking_costs_no_memory():
    """gpt-oss with 11 TB of weights, far more than any machine gives."""
    options = {**WORKING["GptOssConfig"], "hidden_size": 8192, "intermediate_size": 65536, "num_local_experts": 512}
    model = build_empty(family_config("GptOssConfig", {**options, "num_hidden_layers": 3}), torch.float32)
    model.set_experts_implementation(EXPERTS)
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 9e12
    probe(model, [module for module in model.modules() if hasattr(module, "is_transposed")])


def test_gpt_oss_as_it_is_published(tmp_path):
    """transformers dequantizes MXFP4 too where there is no GPU: the same values, the same text."""
    model = save_mxfp4(tmp_path)
    check(model)
    table = load_skeleton(tmp_path, torch.float32).table
    assert table.shape.mxfp4 and table.shape.nbytes * 32 == table.shape.numel * 17


def test_a_model_that_also_sees_works_by_text_alone(tmp_path):
    """Gemma 4's experts are published inside a model for images and text."""
    text = family_config("Gemma4TextConfig", WORKING["Gemma4TextConfig"])
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 16}
    ends = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS}
    config = Gemma4Config(text_config=text.to_dict(), vision_config=vision, audio_config=None, **ends)
    check(save_model(tmp_path, config), new_tokens=8)


def test_other_quantized_checkpoints_are_refused(tmp_path):
    config = mixtral_config()
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"quantized \(fp8\): use one in F32, BF16, F16, or in MXFP4"):
        Engine.load(EngineConfig(model=str(tmp_path)))
