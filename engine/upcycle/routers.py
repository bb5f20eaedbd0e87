"""Routers without training: k-means over the hidden states of a text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from engine.errors import Cancelled

#: Tokens that the model reads at once, each window on its own.
WINDOW = 512
ITERATIONS = 25


def hidden_states(
    model: PreTrainedModel, ids: list[int], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
) -> list[torch.Tensor]:
    """What each layer's feed-forward network sees of a text: (tokens, hidden) a layer, in the model's dtype.

    `progress` is told (tokens done, tokens in total). Raises Cancelled.
    """
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]

    def listen(layer: int) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, inputs: seen[layer].append(inputs[0][0])

    handles = [layer.mlp.register_forward_pre_hook(listen(n)) for n, layer in enumerate(model.model.layers)]
    window = min(WINDOW, model.config.max_position_embeddings)
    try:
        with torch.inference_mode():
            for start in range(0, len(ids), window):
                if cancelled():
                    raise Cancelled("upcycling was cancelled")
                model.model(torch.tensor([ids[start : start + window]]), use_cache=False)
                progress(min(start + window, len(ids)), len(ids))
    finally:
        for handle in handles:
            handle.remove()
    return [torch.cat(parts) for parts in seen]


def router(hidden: torch.Tensor, experts: int, generator: torch.Generator) -> torch.Tensor:
    """A router's weight (experts, hidden) that sends each row of `hidden` (tokens, hidden) to its k-means cluster.

    A Mixtral's router has no bias, so the common part of all hidden states would favour the same experts for every
    token. It is projected out, which centres the rest, and a router in that subspace never sees it. Its rows are the
    directions of spherical k-means there, scaled so that the logits have unit variance over the text.
    """
    rows = hidden.float()
    mean = rows.mean(dim=0)
    mean /= mean.norm()
    centred = rows - torch.outer(rows @ mean, mean)
    directions = _spherical_kmeans(torch.nn.functional.normalize(centred, dim=1), experts, generator)
    return directions / (centred @ directions.T).std()


def _spherical_kmeans(rows: torch.Tensor, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Unit vectors (clusters, dimension), each the direction of the unit `rows` (n, dimension) nearest to it."""
    centres = _scattered(rows, clusters, generator)
    for _ in range(ITERATIONS):
        similarity, nearest = (rows @ centres.T).max(dim=1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, rows)
        empty = torch.bincount(nearest, minlength=clusters) == 0
        # A cluster that lost all its rows starts again at those that fit worst elsewhere.
        sums[empty] = rows[similarity.argsort()[: int(empty.sum())]]
        centres = torch.nn.functional.normalize(sums, dim=1)
    return centres


def _scattered(rows: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` rows to start from, each drawn by its squared distance to those drawn before (k-means++)."""
    chosen = [int(torch.randint(len(rows), (1,), generator=generator))]
    distance = torch.full((len(rows),), float("inf"))
    while len(chosen) < count:
        distance = torch.minimum(distance, (2 - 2 * rows @ rows[chosen[-1]]).clamp(min=1e-12))
        chosen.append(int(torch.multinomial(distance, 1, generator=generator)))
    return rows[chosen].clone()


def shares(hidden: torch.Tensor, weight: torch.Tensor, top_k: int) -> torch.Tensor:
    """(experts,) share of all choices of a router for `hidden` (tokens, hidden) that falls on each expert."""
    choices = (hidden.float() @ weight.float().T).topk(top_k, dim=1).indices
    return torch.bincount(choices.flatten(), minlength=len(weight)) / choices.numel()
