"""Every family of transformers that routes its experts through the experts seam, as a config of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, TinyModel, save_model

ROUTED = {"num_experts": 8, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
SMALL = {"moe_intermediate_size": 24}
HEADS = {"head_dim": 8}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, **SMALL}
LATENT = {
    **GROUPS, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3, "num_key_value_heads": 4,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
INDEXED = {**LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
SHARED = {"shared_expert_intermediate_size": 24}

#: What is special about each, so that a failure says where to look. Windows are shorter than the texts.
WORKING: dict[str, dict[str, Any]] = {
    "MixtralConfig": {**LOCAL, "sliding_window": 8},
    "Qwen2MoeConfig": {**ROUTED, **SMALL, **SHARED},  # gated shared expert
    "Qwen3MoeConfig": {**ROUTED, **SMALL, **HEADS, "num_hidden_layers": 3, "mlp_only_layers": [0]},
    "OlmoeConfig": ROUTED,
    "PhimoeConfig": LOCAL,  # sparsemixer router, rotary embeddings that depend on the length
    "GraniteMoeConfig": LOCAL,  # fused on disk, under other names
    "GraniteMoeSharedConfig": {**LOCAL, "shared_intermediate_size": 24},
    "GraniteMoeSWAConfig": {**LOCAL, "sliding_window": 8},
    "GraniteMoeHybridConfig": {
        **LOCAL, "shared_intermediate_size": 24, "layer_types": ["full_attention"] * 2, "mamba_n_heads": 8,
    },
    "DeepseekV2Config": {**LATENT, "q_lora_rank": None, "topk_method": "greedy"},  # latent attention
    "DeepseekV3Config": {**LATENT, "n_group": 2},  # grouped sigmoid router with a bias
    "GptOssConfig": {**LOCAL, **HEADS, "sliding_window": 8},  # transposed, interleaved, biased, clamped; sinks
    "AriaTextConfig": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1},  # transposed
    "NemotronHConfig": {
        **GROUPS, **HEADS, "moe_shared_expert_intermediate_size": 24, "num_hidden_layers": 4,
        "layers_block_type": ["attention", "moe"] * 2,
    },  # no gate
    "MiniMaxM3VLTextConfig": {**LOCAL, **HEADS},  # clamped, not interleaved
    "BeamConfig": {
        **ROUTED, **SMALL, **HEADS, "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 8,
    },  # a gate in float32, capped logits
    "Glm4MoeConfig": {**GROUPS, **HEADS, "first_k_dense_replace": 1},  # partial rotary
    "Glm4MoeLiteConfig": LATENT,
    "Ernie4_5_MoeConfig": {
        **SMALL, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        "num_hidden_layers": 3,
    },
    "Dots1Config": {**GROUPS, **HEADS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "FlexOlmoConfig": ROUTED,
    "HunYuanMoEV1Config": {**HEADS, "num_experts": 8, "moe_topk": 2},  # another name for top-k
    "HYV3Config": {**ROUTED, **SMALL},
    "MiniMaxM2Config": {**LOCAL, **HEADS},
    "Lfm2MoeConfig": {**ROUTED, **SMALL, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2},
    "AXK1Config": LATENT,  # a norm whose name on disk is the end of its own name
    "AfmoeConfig": {**ROUTED, **SMALL, **HEADS, "num_dense_layers": 1, "sliding_window": 8},
    "Gemma4TextConfig": {
        **SMALL, **HEADS, "num_experts": 8, "top_k_experts": 2, "enable_moe_block": True, "global_head_dim": 8,
        "sliding_window": 8, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8,
    },  # experts beside a dense layer, keys of one layer read by others
    "Cohere2MoeConfig": {**ROUTED, "sliding_window": 8},
    "FlintConfig": {**ROUTED, **SMALL, **HEADS, **SHARED, "mlp_only_layers": [0]},
    "MellumConfig": {**ROUTED, **SMALL, **HEADS},
    "LagunaConfig": {**ROUTED, **SMALL, **HEADS},
    "Kolibri1Config": {**ROUTED, **SMALL},
    "SolarOpenConfig": {**GROUPS, **HEADS, "n_shared_experts": 1},
    "ExaoneMoeConfig": {**ROUTED, **SMALL, **HEADS},
    "MiMoV2FlashConfig": {**GROUPS, **HEADS, "v_head_dim": 8},  # sinks
}  # fmt: skip

#: Options, and the reason that is told.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "JetMoeConfig": (LOCAL, "experts interface"),
    "Llama4TextConfig": ({**LOCAL, **HEADS, "intermediate_size_mlp": 48}, "experts interface"),
    "MiniMaxConfig": (LOCAL, "linear_attention, which keep a state"),
    "JambaConfig": ({**ROUTED, "num_hidden_layers": 8, "use_mamba_kernels": False}, "linear_attention"),
    "Qwen3NextConfig": ({**ROUTED, **SMALL, **SHARED, **HEADS}, "linear_attention"),
    "Qwen3_5MoeTextConfig": ({**ROUTED, **SMALL, **SHARED, **HEADS}, "linear_attention"),
    "KimiLinearConfig": ({**ROUTED, **SMALL}, "linear_attention"),
    "BailingHybridConfig": ({**ROUTED, **SMALL}, "linear_attention"),
    "ZayaConfig": ({}, "hybrid, which keep a state"),
    "InklingTextConfig": ({}, "hybrid_sliding"),
    "DeepseekV32Config": (INDEXED, "indexed_attention, which keep more than keys and values"),
    "DeepseekV4Config": ({}, "heavily_compressed_attention"),
    "GlmMoeDsaConfig": (INDEXED, "indexed_attention"),
    "HYV4Config": ({**ROUTED, **SMALL}, "indexed_attention"),
    "Lfm2MoeConfig": ({**ROUTED, **SMALL, "layer_types": ["conv", "full_attention"]}, "conv, which keep a state"),
    "Qwen3VLMoeTextConfig": ({**ROUTED, **SMALL, **HEADS}, "no causal language model for qwen3_vl_moe_text"),
    "SwitchTransformersConfig": ({"num_experts": 8}, "encoder-decoder"),
    "LlamaConfig": ({}, "not a Mixture-of-Experts"),
}


def family_config(name: str, options: dict[str, Any]) -> transformers.PreTrainedConfig:
    return getattr(transformers, name)(**{**SIZES, "intermediate_size": 48, "num_hidden_layers": 2, **options})


def save_family(name: str, directory: Path, **how) -> TinyModel:
    """Random weights of a working family; `how` are options of `save_model`."""
    return save_model(directory, family_config(name, WORKING[name]), **how)


def save_mxfp4(directory: Path) -> TinyModel:
    """A gpt-oss as it is published: experts as 4-bit codes and scales of 32 weights each, all else in bfloat16."""
    sides = {"hidden_size": 64, "intermediate_size": 32}
    model = save_model(directory, family_config("GptOssConfig", {**WORKING["GptOssConfig"], **sides}))
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.dim() == 3:
            experts, columns, rows = tensor.shape
            codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator)
            scales = torch.randint(121, 125, (experts, rows, columns // 32), generator=generator)
            tensors |= {f"{name}_blocks": codes.byte(), f"{name}_scales": scales.byte()}
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return model
