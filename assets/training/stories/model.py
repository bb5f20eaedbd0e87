"""transformers' Qwen3-MoE, with a forward pass that trains fast on a CPU.

The parameters and every block are transformers' own. Only the experts are computed differently:
each gets a fixed number of places (its capacity), so that all of them run as one batched product
with shapes that `torch.compile` knows. With a capacity that no expert exceeds, the result is the
same as transformers'; the export checks that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CAPACITY = 1.5  # places an expert, as a multiple of an even share; tokens beyond it skip that expert


def stories_config(**changes: object) -> Qwen3MoeConfig:
    """The architecture of the embedded model: 11 M parameters, of which a token uses 3 M."""
    settings: dict[str, object] = {
        "vocab_size": 4096, "hidden_size": 192, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 768,
        "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
        "max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True, "router_aux_loss_coef": 0.01,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3MoeConfig(**(settings | changes))


class Trainee(nn.Module):
    """The model under training. `dropout` acts on what each attention and expert block adds."""

    def __init__(self, config: Qwen3MoeConfig, dropout: float = 0.0, capacity: float = CAPACITY) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config, self.dropout, self.capacity = config, dropout, capacity
        self.lm = Qwen3MoeForCausalLM(config)
        # Blocks that add to the residual start small, by depth (GPT-2, section 2.3).
        scale = (2 * config.num_hidden_layers) ** -0.5
        with torch.no_grad():
            for layer in self.lm.model.layers:
                layer.self_attn.o_proj.weight.mul_(scale)
                layer.mlp.experts.down_proj.mul_(scale)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`ids` (batch, window) → logits (batch, window, vocab) and the balance loss, a scalar."""
        body = self.lm.model
        x = body.embed_tokens(ids)
        positions = body.rotary_emb(x, torch.arange(ids.shape[1], device=ids.device)[None])
        balance = x.new_zeros(())
        for layer in body.layers:
            added, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=positions, attention_mask=None)
            x = x + F.dropout(added, self.dropout, self.training)
            hidden = layer.post_attention_layernorm(x).flatten(0, 1)
            router_logits, weights, index = layer.mlp.gate(hidden)
            balance = balance + balance_loss(router_logits, index)
            added = capacity_experts(layer.mlp.experts, hidden, index, weights, self.capacity)
            x = x + F.dropout(added, self.dropout, self.training).view_as(x)
        return self.lm.lm_head(body.norm(x)), balance / len(body.layers)


def balance_loss(router_logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Experts × Σ (share of the tokens × mean probability): 1 when balanced (Switch Transformers, equation 4)."""
    experts = router_logits.shape[-1]
    share = F.one_hot(index.flatten(), experts).float().mean(0)
    return experts * (share * router_logits.float().softmax(-1).mean(0)).sum()


def capacity_experts(
    experts: nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, capacity: float
) -> torch.Tensor:
    """Σ over a token's experts of weight × expert(token), all experts in one batched product.

    `hidden` (tokens, H), `index` and `weights` (tokens, top-k) → (tokens, H).
    """
    tokens, top_k = index.shape
    count, width = experts.num_experts, hidden.shape[-1]
    places = int(min(tokens * top_k * capacity / count, tokens))
    chosen = index.flatten()
    order = chosen.argsort(stable=True)
    chosen = chosen[order]
    per_expert = F.one_hot(chosen, count).sum(0)
    first = per_expert.cumsum(0) - per_expert
    place = torch.arange(tokens * top_k, device=hidden.device) - first[chosen]
    spare = count * places  # one extra row takes whatever found no place
    row = torch.where(place < places, chosen * places + place, spare)
    token = order // top_k

    inputs = hidden.new_zeros(spare + 1, width).index_copy(0, row, hidden[token])[:-1].view(count, places, width)
    gate, up = torch.bmm(inputs, experts.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    outputs = torch.bmm(F.silu(gate) * up, experts.down_proj.transpose(1, 2)).view(spare, width)
    outputs = torch.cat([outputs, outputs.new_zeros(1, width)])[row] * weights.flatten()[order][:, None]
    return hidden.new_zeros(tokens, width).index_add(0, token, outputs.to(hidden.dtype))
