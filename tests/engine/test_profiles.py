"""Profiles of machines and models: published totals, transformers' own architectures, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.control.hardware_profile import HardwareProfile, Processor, load_hardware
from engine.control.model_profile import LatentAttention, ModelProfile, load_model
from engine.control.profile_files import PROFILES, profile_names
from engine.errors import UsageError

MODELS, HARDWARE = profile_names("models"), profile_names("hardware")

#: transformers' name of the architecture, and where its configuration keeps the width of an expert.
ARCHITECTURES = {
    "mixtral-8x7b": ("mixtral", "intermediate_size"),
    "mixtral-8x22b": ("mixtral", "intermediate_size"),
    "phi-3.5-moe": ("phimoe", "intermediate_size"),
    "qwen1.5-moe-a2.7b": ("qwen2_moe", "moe_intermediate_size"),
    "deepseek-v2-lite": ("deepseek_v2", "moe_intermediate_size"),
    "qwen3-30b-a3b": ("qwen3_moe", "moe_intermediate_size"),
    "olmoe-1b-7b": ("olmoe", "intermediate_size"),
    "gpt-oss-20b": ("gpt_oss", "intermediate_size"),
    "gpt-oss-120b": ("gpt_oss", "intermediate_size"),
    "deepseek-v3": ("deepseek_v3", "moe_intermediate_size"),
}


def test_all_that_are_promised_are_there():
    assert set(MODELS) == set(ARCHITECTURES)
    assert set(HARDWARE) == {"a30", "4090d", "a100-40gb", "t4", "l4", "rtx4090", "h100", "h200", "laptop-nvme",
                             "space-2core", "measured-2core"}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_weights_add_up_to_the_published_totals(name: str):
    model = load_model(name)
    assert model.params / 1e9 == pytest.approx(model.total_params, rel=0.005)
    # Some count the embedding among the weights that a token uses, some neither it nor the head.
    least = model.active - 2 * model.head_params
    assert least / 1e9 - 0.05 <= model.active_params <= model.active / 1e9 + 0.05


def configuration(model: ModelProfile):
    kind, width = ARCHITECTURES[model.name]
    attention = model.attention
    settings = {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocabulary,
        "num_attention_heads": attention.heads,
        "num_experts_per_tok": model.top_k,
        width: model.expert_intermediate,
    }
    count = next(key for key in AutoConfig.for_model(kind).to_dict() if key in
                 ("num_local_experts", "num_experts", "n_routed_experts"))  # fmt: skip
    settings[count] = model.experts
    if isinstance(attention, LatentAttention):
        settings |= {"kv_lora_rank": attention.kv_rank, "qk_nope_head_dim": attention.nope_dim,
                     "qk_rope_head_dim": attention.rope_dim, "v_head_dim": attention.value_dim,
                     "q_lora_rank": attention.query_rank or None, "num_key_value_heads": attention.heads,
                     "n_shared_experts": model.shared_intermediate // model.expert_intermediate,
                     "first_k_dense_replace": model.dense_layers, "intermediate_size": model.dense_intermediate,
                     "n_group": 1, "topk_group": 1}  # fmt: skip
    else:
        settings |= {"num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim}
    if model.shared_intermediate and kind == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = model.shared_intermediate
    return AutoConfig.for_model(kind, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers_own_model(name: str):
    """Two layers with experts and all that have none, on meta. Norms, biases and sinks are not counted."""
    model = load_model(name)
    model = replace(model, layers=model.dense_layers + 2)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(configuration(model))
    counted = sum(
        parameter.numel()
        for key, parameter in built.named_parameters()
        if "norm" not in key and "bias" not in key and "sinks" not in key
    )
    assert counted == pytest.approx(model.params, rel=1e-4)


def test_keys_and_values_of_a_token():
    assert load_model("mixtral-8x7b").kv_bytes() == 128 * 1024
    assert load_model("deepseek-v3").kv_bytes() == 70_272  # 70.272 KB (2505.09343, table 1)


@pytest.mark.parametrize("name", HARDWARE)
def test_machines_are_plausible(name: str):
    hardware = load_hardware(name)
    assert hardware.label
    assert hardware.slow_gbps < hardware.fast.memory_gbps  # else nobody would wait for experts
    assert hardware.fast.ridge > 1


def test_a_processor_is_as_slow_as_its_slower_roof():
    processor = Processor(tflops=2, memory_gbps=100, memory_gib=8)
    assert processor.ridge == 20
    assert processor.seconds(2e12, 1e9) == 1
    assert processor.seconds(1e9, 1e11) == 1


def changed(kind: str, name: str, tmp_path: Path, **changes) -> str:
    found = json.loads((PROFILES / kind / f"{name}.json").read_text()) | changes
    path = tmp_path / "own.json"
    path.write_text(json.dumps({key: value for key, value in found.items() if value != "gone"}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bus": 3}, "'bus'"),
        ({"sources": "gone"}, "needs sources"),
        ({"sources": {"a": ["gpu", "cpu"]}}, "'link_gbps' needs one source, and has 0"),
        ({"sources": {"a": ["gpu", "cpu", "link_gbps"], "b": ["gpu.tflops"]}}, "'gpu.tflops' needs one source"),
        ({"sources": {"a": ["gpu", "cpu", "link_gbps", "disk"]}}, "no figure"),
        ({"gpu": {"tflops": 1, "memory_gbps": 1}}, "lacks 'memory_gib'"),
        ({"gpu": {"tflops": -1, "memory_gbps": 1, "memory_gib": 1}}, "above 0"),
        ({"link_gbps": "fast"}, "above 0"),
    ],
)
def test_a_machine_of_ones_own_is_checked(changes: dict, message: str, tmp_path: Path):
    with pytest.raises(UsageError, match=message):
        load_hardware(changed("hardware", "a30", tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"kind": "linear", "heads": 8}}, "grouped or latent"),
        ({"attention": {"kind": "grouped", "heads": 8, "kv_heads": 8, "head_dim": 64, "window": 3}}, "window"),
        ({"top_k": 9}, "more than its 8 experts"),
        ({"hidden": "gone"}, "no figure"),
        ({"expert_bits": 0}, "expert_bits"),
    ],
)
def test_a_model_of_ones_own_is_checked(changes: dict, message: str, tmp_path: Path):
    with pytest.raises(UsageError, match=message):
        load_model(changed("models", "mixtral-8x7b", tmp_path, **changes))


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(UsageError, match="use one of 4090d"):
        load_hardware("h300")
    path = tmp_path / "own.json"
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"own\.json"):
            load_model(str(path))


def test_a_machine_needs_a_way_for_its_experts():
    cpu = Processor(1, 10, 8)
    with pytest.raises(UsageError, match="disk_gbps"):
        HardwareProfile("a", "A", cpu)
    with pytest.raises(UsageError, match="link_gbps"):
        HardwareProfile("a", "A", cpu, gpu=cpu)
