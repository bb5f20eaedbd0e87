"""No modeling code is copied: architectures that nobody named here work through the same two seams, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from tiny_models import PROMPTS, SIZES, TinyModel, greedy, mixtral_config, save_model

from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.model.skeleton import load_skeleton

ROUTED = {"num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "topk_group": 1,
}  # fmt: skip

#: What is special about each, so that a failure says where to look.
WORKING: dict[str, dict] = {
    "PhimoeConfig": {"num_local_experts": 8, "num_experts_per_tok": 2},  # sparsemixer router
    "Qwen2MoeConfig": {**ROUTED, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},  # gated shared
    "GraniteMoeConfig": {"num_local_experts": 8, "num_experts_per_tok": 2},  # experts fused on disk
    "DeepseekV2Config": {**DEEPSEEK, "topk_method": "greedy", "n_group": 1},  # latent attention
    "DeepseekV3Config": {**DEEPSEEK, "n_group": 2},  # grouped sigmoid router with a bias
    "Glm4MoeConfig": {
        "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "head_dim": 8,
    },  # partial rotary
    "FlexOlmoConfig": ROUTED,
    "HunYuanMoEV1Config": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},  # another name for top-k
}  # fmt: skip

REFUSED: dict[str, tuple[dict, str]] = {
    "GptOssConfig": ({"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}, "biases"),
    "Llama4TextConfig": ({"num_local_experts": 8, "intermediate_size_mlp": 48}, "experts interface"),
    "MiniMaxConfig": ({"num_local_experts": 8, "num_experts_per_tok": 2}, "linear_attention"),
    "JambaConfig": ({**ROUTED, "num_hidden_layers": 8, "use_mamba_kernels": False}, "linear_attention"),
}


def tiny(name: str, options: dict, directory: Path) -> TinyModel:
    config = getattr(transformers, name)(**{**SIZES, "intermediate_size": 48, "num_hidden_layers": 2, **options})
    return save_model(directory, config)


def check(model: TinyModel, prompts: tuple[str, ...] = PROMPTS[:4], new_tokens: int = 12) -> None:
    """Ragged batch with drafts, and plain decoding alone, both with few slots."""
    expected = greedy(model.reference(), model.directory, prompts, new_tokens)
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
    check(tiny(name, WORKING[name], tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_a_reason(name: str, tmp_path):
    options, reason = REFUSED[name]
    model = tiny(name, options, tmp_path)
    with pytest.raises(ModelError, match=reason):
        Engine.load(EngineConfig(model=str(model.directory)))


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
    import torch

    skeleton = load_skeleton(tiny_model("qwen3_moe").directory, torch.float32)
    experts = [p for module in skeleton.experts_modules for p in module.parameters()]
    assert experts and all(parameter.is_meta for parameter in experts)
    here = {id(parameter) for parameter in experts}
    shared = [p for p in skeleton.model.parameters() if id(p) not in here]
    assert not any(parameter.is_meta for parameter in shared)
    assert skeleton.shared_bytes == sum(p.numel() * 4 for p in shared)
