"""One request on its way through the engine: its sequences, knobs and random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from engine.config import K_LIMIT, GenerationConfig, KnobBlock
from engine.errors import UsageError
from engine.events import Event
from engine.loading import LoadedModel
from engine.model.text import TextStream
from engine.offload.stats import CacheStats
from engine.recorder import Recorder
from engine.requests import Request
from engine.speculation.batch import Batch, Sequence
from engine.speculation.drafters import Drafter, DraftRun
from engine.speculation.sampling import SamplingParams
from engine.speculation.watch import DraftWatch

#: 2³² over the golden ratio: no two of the seeds that a person would try, or of their sequences, meet. The generator
#: looks at 32 bits of a seed.
SPREAD = 0x9E3779B1


@dataclass
class Run:
    """What one call of `generate` owns.

    `batch` holds the waiting and the unfinished ones of `sequences`; `prefill_stats` are the cache's totals when
    decoding began. `draft_alarm` says why the drafter was switched off, if it was.
    """

    options: GenerationConfig
    knobs: KnobBlock
    params: SamplingParams
    recorder: Recorder
    sequences: list[Sequence]
    batch: Batch
    drafter: Drafter
    stop: threading.Event
    round: int = 0
    prefill_stats: CacheStats = field(default_factory=CacheStats)
    watch: DraftWatch = field(default_factory=DraftWatch)
    draft_alarm: str | None = None


def open_run(
    loaded: LoadedModel,
    prompts: Iterable[str | Request],
    options: GenerationConfig,
    knobs: KnobBlock,
    create_drafter: Callable[[DraftRun], Drafter],
    emit: Callable[[Event], None] | None,
    stop: threading.Event,
) -> Run:
    """Check the prompts and allocate what `options.batch` of them need.

    Raises UsageError for prompts that cannot run.
    """
    requests = [prompt if isinstance(prompt, Request) else Request(prompt) for prompt in prompts]
    if not requests:
        raise UsageError("no prompt: give at least one")
    sequences = [_sequence(loaded, number, request, options) for number, request in enumerate(requests)]
    longest = max(len(s.prompt_ids) + s.max_new_tokens for s in sequences)
    # Padding rows of ragged rounds write past their sequence's end: K_LIMIT + 2 rows at most.
    cache = loaded.runner.new_cache(min(options.batch, len(sequences)), longest + K_LIMIT + 2)
    params = SamplingParams(options.temperature, options.top_k, options.top_p)
    batch = Batch.of(sequences, cache)
    drafter = create_drafter(DraftRun(batch, loaded.runner.config.vocab_size, params, stop))
    return Run(options, knobs, params, Recorder(emit), sequences, batch, drafter, stop)


def _sequence(loaded: LoadedModel, number: int, request: Request, options: GenerationConfig) -> Sequence:
    ids = _encode(loaded.tokenizer, request.prompt, options.chat)
    new_tokens = request.max_new_tokens or options.max_new_tokens
    context = getattr(loaded.runner.config, "max_position_embeddings", None)
    if context is not None and len(ids) + new_tokens > context:
        room = context - len(ids)
        advice = f"use --max-new-tokens {room} or less" if room > 0 else "shorten the prompt"
        raise UsageError(
            f"{len(ids)} prompt tokens and {new_tokens} new ones exceed the model's context of "
            f"{context} tokens: {advice}"
        )
    # Another seed each, or equal prompts would get equal answers.
    luck = torch.Generator().manual_seed((options.seed + number * SPREAD) % 2**32)
    return Sequence(number, ids, new_tokens, TextStream(loaded.tokenizer, ids, options.stop), luck)


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> list[int]:
    if not prompt.strip():
        raise UsageError("the prompt is empty: write at least one word")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not valid Unicode text: look at character {error.start + 1}") from error
    if not chat:
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise UsageError("this model has no chat template: leave out --chat, or choose a model that was tuned to chat")
    # Sanitized: what looks like the end of a message in the prompt is text.
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    return cast(list[int], ids)
