"""What only a pass through the model tells: the size of its KV cache, the compute time of a layer."""

from __future__ import annotations

import time

import torch

from engine.loading import LoadedModel
from engine.model.runner import Experts
from engine.offload.cache import ExpertCache
from engine.offload.experts import OffloadedExperts
from engine.passes import PassObserver
from engine.recorder import Recorder

# The first passes warm caches and allocators up; the median of the rest is kept.
PASSES, WARM_UP = 16, 4


def measure_kv_bytes(loaded: LoadedModel, passes: PassObserver, experts: Experts) -> int:
    """Bytes of keys and values that one token adds, by decoding one. It also warms the libraries up."""
    kv = loaded.runner.new_cache(1, 1)
    zero, one = torch.tensor([0]), torch.tensor([1])
    passes.begin("draft")
    loaded.runner.forward(kv, experts, torch.tensor([[0]]), zero, zero, one)
    return kv.nbytes


def measure_layer_seconds(
    loaded: LoadedModel, cache: ExpertCache, passes: PassObserver, experts: OffloadedExperts
) -> float:
    """Seconds that the target takes for one token and one layer, without waiting for experts.

    Decodes a few tokens with an empty context and takes the time that was not spent waiting.
    """
    kv = loaded.runner.new_cache(1, PASSES + 1)
    slot, one = torch.tensor([0]), torch.tensor([1])
    recorder = Recorder(None)
    passes.attach(recorder, cache)
    measured = []
    token = torch.tensor([[0]])
    for step in range(PASSES):
        recorder.begin_round(step)
        start = time.perf_counter_ns()
        passes.begin("verify", [1])
        logits = loaded.runner.forward(kv, experts, token, slot, torch.tensor([step]), one)
        passes.end()
        measured.append(time.perf_counter_ns() - start - recorder.round_stall_ns())
        token = logits[:, -1].argmax(-1, keepdim=True)
    passes.attach(None, cache)
    cache.reset()
    steady = sorted(measured[WARM_UP:])
    return steady[len(steady) // 2] / 1e9 / loaded.runner.config.num_hidden_layers
