"""What transformers does with the same model: greedy decoding out of the box, resident or offloaded to disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation import BaseStreamer

from engine.bench.prompts import PROMPTS
from engine.config import EngineConfig, cache_directory
from engine.model.checkpoint import resolve_directory

#: How transformers' models call the module that holds the fused experts of a layer.
EXPERTS = "experts"


@dataclass
class Outcome:
    """What a contender did over all prompts and repeats; `ids` are the token ids of each prompt's text."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def rate(self) -> float | None:
        """Tokens a second of decoding."""
        return self.tokens / self.seconds if self.seconds else None


class _Clock(BaseStreamer):
    """When each new token came; it stands still while `between` runs, after each."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._between = between
        self._stood_still = 0.0

    def put(self, value: torch.Tensor) -> None:
        now = time.perf_counter()
        self.times.append(now - self._stood_still)
        self._between()
        self._stood_still += time.perf_counter() - now

    def end(self) -> None:
        pass


def _nothing() -> None:
    pass


def run_transformers(
    config: EngineConfig,
    max_new_tokens: int,
    outcome: Outcome,
    between: Callable[[], None] = _nothing,
    **placement: Any,
) -> None:
    """Add one pass of greedy decoding as transformers does it out of the box, timed from the prefill's end.

    `placement` goes to `from_pretrained`: where the weights lie. `between` runs after each token, outside of the time.
    """
    directory = resolve_directory(config.model)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, config.dtype), local_files_only=True, **placement
    )
    model.eval()

    def generate(prompt: str) -> tuple[list[int], list[float]]:
        inputs, clock = tokenizer(prompt, return_tensors="pt"), _Clock(between)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, streamer=clock)
        return ids[0, inputs["input_ids"].shape[1] :].tolist(), clock.times

    generate(PROMPTS[0])
    for prompt in PROMPTS:
        # The streamer hears of the prompt first; the first new token ends the prefill.
        ids, times = generate(prompt)
        outcome.tokens += len(ids) - 1
        outcome.seconds += times[-1] - times[1]
        outcome.ids[prompt] = ids


def run_disk_offload(config: EngineConfig, max_new_tokens: int, outcome: Outcome) -> None:
    """The same with the experts on disk, as accelerate offloads them: all experts of a layer come for each pass.

    accelerate maps files, so the page cache would hold every expert, whatever the limit on memory: it is emptied of
    them after each token. Its own copy of the experts goes into a directory that is removed afterwards.
    """
    parent = cache_directory()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="disk-offload-", dir=parent) as folder:
        run_transformers(
            config,
            max_new_tokens,
            outcome,
            between=lambda: forget_pages(Path(folder)),
            device_map=expert_map(config.model),
            offload_folder=folder,
        )


def forget_pages(folder: Path) -> None:
    """Empty the page cache of the files in `folder`, where the system can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only pages that are written can be forgotten
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def expert_map(model: str) -> dict[str, str]:
    """accelerate's device map: routed experts on disk, everything else in memory."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve_directory(model)))
    places: dict[str, str] = {}

    def place(module: nn.Module, name: str) -> None:
        if name.rpartition(".")[2] == EXPERTS:
            places[name] = "disk"
        elif any(inner.rpartition(".")[2] == EXPERTS for inner, _ in module.named_modules()):
            for child, inside in module.named_children():
                place(inside, f"{name}.{child}" if name else child)
        else:
            places[name] = "cpu"

    place(skeleton, "")
    return places
