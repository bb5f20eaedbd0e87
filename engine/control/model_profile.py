"""What a Mixture-of-Experts model weighs and computes, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from engine.control.profile_files import build_part, check_positive, check_sources, read_profile
from engine.errors import UsageError


@dataclass(frozen=True)
class GroupedAttention:
    """Query heads that share key/value heads (GQA; multi-head when there are as many of both)."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def value_dim(self) -> int:
        """Values of one head's output."""
        return self.head_dim

    def params(self, hidden: int) -> int:
        """Weights of the four projections of one layer."""
        return 2 * hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def kv_values(self) -> int:
        """Values cached for one token in one layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def flops(self) -> int:
        """Operations of one row over one cached token in one layer: its scores, and the sum they weight."""
        return 4 * self.heads * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); without `query_rank` queries are not compressed."""

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int = 0

    def params(self, hidden: int) -> int:
        query = self.heads * (self.nope_dim + self.rope_dim)
        queries = self.query_rank * (hidden + query) if self.query_rank else hidden * query
        keys_values = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * (
            self.nope_dim + self.value_dim
        )
        return queries + keys_values + self.heads * self.value_dim * hidden

    @property
    def kv_values(self) -> int:
        """The compressed vector and the shared rotary key."""
        return self.kv_rank + self.rope_dim

    @property
    def flops(self) -> int:
        """With the up-projections absorbed, so that scores and sums are taken over the compressed vector."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope_dim)


ATTENTION = {"grouped": GroupedAttention, "latent": LatentAttention}


@dataclass(frozen=True)
class ModelProfile:
    """A model; `layers` counts all, the first `dense_layers` of which have one network of `dense_intermediate`.

    `shared_intermediate` is the total width of the experts that every token passes; bits are those that a weight
    takes as it is served; `total_params` and `active_params` are as published, in 10⁹.
    """

    name: str
    label: str
    hidden: int
    layers: int
    vocabulary: int
    experts: int
    top_k: int
    expert_intermediate: int
    attention: GroupedAttention | LatentAttention
    total_params: float
    active_params: float
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    expert_bits: float = 16
    other_bits: float = 16

    def __post_init__(self) -> None:
        counts = ("hidden", "layers", "vocabulary", "experts", "top_k", "expert_intermediate", "total_params")
        check_positive(f"model {self.name}", **{name: getattr(self, name) for name in counts})
        check_positive(f"model {self.name}", expert_bits=self.expert_bits, other_bits=self.other_bits)
        if self.top_k > self.experts:
            raise UsageError(f"model {self.name}: top_k {self.top_k} is more than its {self.experts} experts")
        if not 0 <= self.dense_layers < self.layers:
            raise UsageError(f"model {self.name}: {self.dense_layers} dense layers leave none of {self.layers}")

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert: gate, up and down."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def expert_bytes(self) -> float:
        return self.expert_params * self.expert_bits / 8

    @property
    def experts_bytes(self) -> float:
        """All routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_bytes

    @property
    def layer_params(self) -> int:
        """What every token passes in one MoE layer: attention, router, shared experts."""
        routing = self.hidden * self.experts + 3 * self.hidden * self.shared_intermediate
        return self.attention.params(self.hidden) + routing

    @property
    def head_params(self) -> int:
        """The projection onto the vocabulary; the embedding is as large, but only rows of it are read."""
        return self.hidden * self.vocabulary

    @property
    def dense_params(self) -> int:
        """All weights of the layers that have no experts."""
        return self.dense_layers * (self.attention.params(self.hidden) + 3 * self.hidden * self.dense_intermediate)

    @property
    def shared_params(self) -> int:
        """All that is no routed expert: resident in fast memory, always."""
        return self.moe_layers * self.layer_params + self.dense_params + 2 * self.head_params

    @property
    def shared_bytes(self) -> float:
        return self.shared_params * self.other_bits / 8

    @property
    def params(self) -> int:
        """All weights but norms and biases, which are less than 0.1 %."""
        return self.shared_params + self.moe_layers * self.experts * self.expert_params

    @property
    def active(self) -> int:
        """Weights that one token uses (counted with the embedding, as model cards do)."""
        return self.shared_params + self.moe_layers * self.top_k * self.expert_params

    def kv_bytes(self, layers: int | None = None) -> float:
        """16-bit keys and values of one token, in all layers unless told how many."""
        return 2 * self.attention.kv_values * (self.layers if layers is None else layers)


def load_model(name: str) -> ModelProfile:
    """The profile of that name in assets/profiles/models, or in a .json file. Raises UsageError."""
    found = read_profile("models", name)
    where = f"model {name}"
    check_sources(found, where)
    figures = {key: value for key, value in found.items() if key not in ("sources", "note")}
    attention = dict(figures.get("attention") or {})
    kind = attention.pop("kind", None)
    if kind not in ATTENTION:
        raise UsageError(f"{where}: unknown kind of attention {kind!r}: use {' or '.join(ATTENTION)}")
    figures["attention"] = build_part(ATTENTION[kind], attention, f"{where}: attention")
    return build_part(ModelProfile, {"name": name, **figures}, where)
