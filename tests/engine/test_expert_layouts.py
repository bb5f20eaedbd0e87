"""One expert as we compute it against the experts modules of transformers, in each layout that any of them declares."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AriaTextConfig, GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.configuration_openai_privacy_filter import OpenAIPrivacyFilterConfig
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

from engine.model.ffn import apply_expert, gate_up_name
from engine.model.layout import ExpertShape

SIDES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 12,
}
LOCAL = {"num_local_experts": 4}
MODULES = {
    "plain": (MixtralExperts, MixtralConfig(**SIDES, **LOCAL)),
    "transposed": (AriaExperts, AriaTextConfig(**SIDES, moe_num_experts=4)),
    "transposed, interleaved, biased, clamped": (GptOssExperts, GptOssConfig(**SIDES, **LOCAL)),
    "transposed, biased, clamped": (OpenAIPrivacyFilterExperts, OpenAIPrivacyFilterConfig(**SIDES, **LOCAL)),
    "no gate": (NemotronHExperts, NemotronHConfig(**SIDES, n_routed_experts=4)),
    "norm behind": (MuseSparkExperts, MuseSparkTextConfig(**SIDES, **LOCAL, moe_hidden_size=16)),
}


@pytest.mark.parametrize("kind", MODULES)
@torch.no_grad()
def test_every_expert_is_computed_as_transformers_does(kind: str):
    make, config = MODULES[kind]
    config._experts_implementation = "eager"
    torch.manual_seed(3)
    module = make(config)
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter))
    gate_up, down = getattr(module, gate_up_name(module)), module.down_proj
    sides = down.shape[1:] if module.is_transposed else down.shape[:0:-1]
    shape = ExpertShape(sides[1], sides[0], torch.float32, module.has_gate, module.is_transposed)
    x = torch.randn(5, shape.hidden)
    for expert in range(down.shape[0]):
        flat = torch.cat([gate_up[expert].flatten(), down[expert].flatten()])
        assert flat.numel() == shape.numel
        ours = apply_expert(module, expert, x, *shape.views(flat), F.linear)
        index = torch.full((5, 1), expert)
        torch.testing.assert_close(ours, module(x, index, torch.ones(5, 1)), rtol=1e-4, atol=1e-4)
