"""The target drafts for itself, with cheaper experts."""

from __future__ import annotations

from collections.abc import Callable

from engine.model.runner import ModelRunner
from engine.offload.experts import QuantizedExperts
from engine.offload.resident import ResidentExperts
from engine.speculation.batch import Batch
from engine.speculation.drafters.base import Draft, Drafter, DraftRun
from engine.speculation.sampling import propose


class SelfDrafter(Drafter):
    """The target itself with other experts: quantized ones, or those that are resident.

    Attention, routers and KV cache are the target's own. It reads the target's KV and appends its own behind it;
    verification overwrites those (MoE-SpeQ, section 3.4).
    """

    routes = True

    def __init__(self, runner: ModelRunner, experts: QuantizedExperts | ResidentExperts, run: DraftRun) -> None:
        self._runner = runner
        self._experts = experts
        self._run = run
        self.nbytes = experts.nbytes

    def draft(self, batch: Batch, k: int, on_token: Callable[[int], None]) -> Draft:
        lengths = batch.draft_lengths(k)
        longest = int(lengths.max())
        slots, starts, ids = batch.slots, batch.starts, batch.current
        params = self._run.params
        tokens, probs, confidence = [], [], []
        for i in range(longest):
            # A sequence that drafts fewer tokens keeps its place in the batch, but its rows reach no expert.
            rows = (lengths > i).long()
            logits = self._runner.forward(batch.cache, self._experts, ids, slots, starts + i, rows, keep=1)
            guess, q, sure = propose(logits[:, 0], params, batch.draw(rows.tolist())[:, 0])
            tokens.append(guess)
            probs.append(q)
            confidence.append(sure)
            ids = guess[:, None]
            on_token(i)
        return Draft.of(tokens, probs, lengths, confidence) if tokens else Draft.empty(len(batch.sequences))
