"""Which attention modules the one-call kernel stands in for, and that a model then says what it said before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import save_family
from tiny_models import CONFIGS, llama_config, olmoe_config, save_model

from engine.config import KERNELS, EngineConfig
from engine.engine import Engine
from engine.kernels.native import Native, native
from engine.kernels.shared import use_kernels
from engine.model.self_attention import KernelAttention, use_self_attention_kernel

#: Norms over each head, over all of them, none; biases; half of a head turned; a window.
STANDARD = ("Qwen3MoeConfig", "OlmoeConfig", "PhimoeConfig", "Glm4MoeConfig", "Qwen2MoeConfig", "GraniteMoeConfig")
#: Sinks, latent attention, interleaved rotation, norms after the rotation, a gate.
OTHERS = ("GptOssConfig", "DeepseekV3Config", "Ernie4_5_MoeConfig", "HunYuanMoEV1Config", "AfmoeConfig")


@pytest.fixture(autouse=True)
def kernels() -> None:
    if not isinstance(native(), Native):
        pytest.skip("the kernels are absent or switched off")


def stand_ins(model: torch.nn.Module) -> list[bool]:
    """For each module that has a q_proj: whether the kernel stands in for it."""
    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "o_proj")]
    return [isinstance(vars(module).get("forward"), KernelAttention) for module in modules]


def logits(model: Path, kernels: tuple[str, ...]) -> tuple[torch.Tensor, list[bool]]:
    engine = Engine.load(EngineConfig(model=str(model), dtype="float32", kernels=kernels))
    try:
        runner, ids = engine.loaded.runner, torch.tensor([[7, 9, 7, 30, 2, 5, 77, 8]])
        cache, slots, starts = runner.new_cache(2, 20), torch.tensor([1]), torch.tensor([0])
        parts = []
        for a, b in ((0, 5), (5, 8)):
            engine.passes.begin("verify", [b - a])
            rows = torch.tensor([b - a])
            parts.append(runner.forward(cache, engine.target_experts, ids[:, a:b], slots, starts + a, rows))
        return torch.cat(parts, 1), stand_ins(engine.loaded.skeleton.model)
    finally:
        engine.close()


@pytest.mark.parametrize("family", [*STANDARD, *OTHERS])
def test_a_family(family: str, tmp_path: Path) -> None:
    directory = save_family(family, tmp_path).directory
    found, standing = logits(directory, KERNELS)
    expected, nobody = logits(directory, tuple(name for name in KERNELS if name != "attention"))
    assert all(standing) if family in STANDARD else not any(standing)
    assert not any(nobody)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_clipped_projections_are_left_to_the_model(tmp_path: Path) -> None:
    """Ordinary inputs never reach the limit, so that only large ones tell."""
    for limit, standing in ((None, True), (200.0, False)):
        directory = save_model(tmp_path / str(limit), olmoe_config(clip_qkv=limit)).directory
        assert logits(directory, KERNELS)[1] == [standing, standing], limit


@pytest.mark.parametrize("change", ["scaled by position", "gated", "another cache"])
def test_what_another_forward_does_is_left_to_it(change: str, tmp_path: Path) -> None:
    """A module with all the parts, whose code does something else with them."""
    model = save_model(tmp_path, llama_config()).reference()
    attention = model.model.layers[0].self_attn
    own = attention.forward

    def forward(hidden_states, *args, position_ids=None, cache=None, **options):
        if change == "scaled by position":
            hidden_states = hidden_states * (1 + 0.1 * torch.log1p(position_ids[..., None] // 4096))
        if change == "another cache":
            raise TypeError("it takes a cache of its own")
        out, weights = own(hidden_states, *args, cache=cache, **options)
        return (out * 1.1 if change == "gated" else out), weights

    attention.forward = forward
    use_kernels(model)
    use_self_attention_kernel(model)
    first, *others = stand_ins(model)
    assert not first
    assert all(others)


def test_without_linear_or_attention_kernels_nobody_stands_in(tmp_path: Path) -> None:
    directory = save_model(tmp_path, CONFIGS["mixtral"]()).directory
    for names in (("linear", "experts"), ("attention", "experts")):
        assert not any(logits(directory, names)[1])


def test_rotations_that_remember_are_not_told_of_positions_that_nobody_asked_for(tmp_path: Path) -> None:
    """A dynamic rotation grows with the longest text that it has seen; the trial's is a million tokens long."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = save_model(tmp_path, llama_config(head_dim=8, rope_parameters=scaling)).reference()
    before = model.model.rotary_emb.inv_freq.clone()
    use_kernels(model)
    use_self_attention_kernel(model)
    assert all(stand_ins(model))
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
