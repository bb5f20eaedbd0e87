"""A small model of its own drafts, beside the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.config import K_LIMIT
from engine.errors import Cancelled
from engine.model.draft_model import DraftModel
from engine.speculation.batch import Batch, Sequence
from engine.speculation.drafters.base import Draft, Drafter, DraftRun
from engine.speculation.sampling import propose

# Rows of one pass over text that the draft has not read yet: bounds the activations of a long prompt.
READ_ROWS = 512
# Rows that a round may have to catch up on: what the last one accepted, and the token behind it.
CATCH_UP = K_LIMIT + 1


@dataclass
class Reading:
    """How much of a sequence the draft's KV cache holds: `text` tokens of it, and behind them its own `guesses`."""

    text: int = 0
    guesses: tuple[int, ...] = ()

    def settle(self, sequence: Sequence) -> None:
        """Keep the guesses that became text. The others stay where they are, and will be overwritten."""
        became = sequence.since(self.text)
        right = next((i for i, (a, b) in enumerate(zip(self.guesses, became, strict=False)) if a != b), None)
        count = min(len(self.guesses), len(became)) if right is None else right
        # The newest token must be read (again) in any case: what follows it is what we are asked for.
        self.text = min(self.text + count, sequence.cached)
        self.guesses = ()


class ModelDrafter(Drafter):
    """Drafts with a small causal model that shares the target's vocabulary (Leviathan et al. 2023).

    Its KV cache is its own, with a length for each sequence. A rejected guess is never taken out: the next round
    writes over it. Where its context ends, a sequence is decoded plainly.
    """

    def __init__(self, model: DraftModel, run: DraftRun) -> None:
        self._model, self._run = model, run
        sequences, length = len(run.batch.cache.lengths), run.batch.cache.max_length
        self._cache = model.runner.new_cache(sequences, length)
        self._readings = [Reading() for _ in range(sequences)]
        self.nbytes = model.weight_nbytes + model.kv_nbytes_per_token * sequences * length

    def join(self, sequences: list[Sequence]) -> None:
        """Read their prompts, all but the last tokens."""
        for sequence in sequences:
            self._readings[sequence.slot] = Reading()
            if self._room(sequence) > 0:
                self._read(sequence, until=sequence.cached)

    def draft(self, batch: Batch, k: int, on_token: Callable[[int], None]) -> Draft:
        room = torch.tensor([max(self._room(sequence), 0) for sequence in batch.sequences])
        lengths = batch.draft_lengths(k).minimum(room)
        served = lengths.nonzero().flatten()
        if not len(served):
            return Draft.empty(len(batch.sequences))
        sequences = [batch.sequences[i] for i in served.tolist()]
        logits = self._catch_up(sequences)
        tokens: list[torch.Tensor] = []
        probs, confidence = [], []
        wanted, longest = lengths[served], int(lengths.max())
        slots, starts = torch.tensor([s.slot for s in sequences]), torch.tensor([s.cached for s in sequences])
        for i in range(longest):
            if i:
                rows = (wanted > i).long()
                logits = self._model.runner.forward(
                    self._cache, None, self._known(tokens[-1])[:, None], slots, starts + i, rows, keep=1
                )[:, 0]
            logits = self._as_target(logits)
            luck = batch.draw((lengths > i).long().tolist())[served, 0]
            guess, q, sure = propose(logits, self._run.params, luck)
            tokens.append(guess)
            probs.append(q)
            confidence.append(sure)
            on_token(i)
        for number, sequence in enumerate(sequences):
            # The last token was guessed but not read.
            guesses = tuple(int(token[number]) for token in tokens[: int(wanted[number]) - 1])
            self._readings[sequence.slot] = Reading(sequence.cached + 1, guesses)
        draft = Draft.of(tokens, probs, lengths, confidence)
        known = None if draft.probs is None else _spread(draft.probs, served, len(lengths))
        guessed, sure = (_spread(part, served, len(lengths)) for part in (draft.tokens, draft.confidence))
        return Draft(guessed, known, lengths, sure)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that may still be drafted before the draft's context ends, padding rows included."""
        context = self._model.context
        return K_LIMIT if context is None else context - (sequence.cached + 1) - CATCH_UP

    def _catch_up(self, sequences: list[Sequence]) -> torch.Tensor:
        """Read what is new of each sequence; the logits (sequences, vocab) behind the newest tokens."""
        for sequence in sequences:
            self._readings[sequence.slot].settle(sequence)
            if sequence.cached + 1 - self._readings[sequence.slot].text > CATCH_UP:
                self._read(sequence, until=sequence.cached)
        starts = torch.tensor([self._readings[sequence.slot].text for sequence in sequences])
        fresh = [sequence.since(start) for sequence, start in zip(sequences, starts.tolist(), strict=True)]
        rows = torch.tensor([len(ids) for ids in fresh])
        width = int(rows.max())
        ids = torch.tensor([new + [0] * (width - len(new)) for new in fresh])
        slots = torch.tensor([sequence.slot for sequence in sequences])
        logits = self._model.runner.forward(self._cache, None, self._known(ids), slots, starts, rows)
        return logits[torch.arange(len(sequences)), rows - 1]

    def _read(self, sequence: Sequence, until: int) -> None:
        """Bring the KV cache up to position `until` of one sequence. Raises Cancelled."""
        reading = self._readings[sequence.slot]
        slot = torch.tensor([sequence.slot])
        while reading.text < until:
            if self._run.stop.is_set():
                raise Cancelled("stopped")
            ids = torch.tensor([sequence.since(reading.text)[: min(READ_ROWS, until - reading.text)]])
            start, rows = torch.tensor([reading.text]), torch.tensor([ids.shape[1]])
            self._model.runner.forward(self._cache, None, self._known(ids), slot, start, rows, keep=1)
            reading.text += ids.shape[1]

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the draft has an embedding for: a target with more padding may emit others, which mean nothing."""
        return ids.clamp(max=self._model.vocab - 1)

    def _as_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's ids, whose output head may have more or fewer rows of padding."""
        missing = self._run.vocab - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, : self._run.vocab]


def _spread(part: torch.Tensor, served: torch.Tensor, batch: int) -> torch.Tensor:
    """`part` (served sequences, …) with zeros for the sequences of the batch that were not served."""
    if len(served) == batch:
        return part
    return part.new_zeros(batch, *part.shape[1:]).index_copy_(0, served, part)
