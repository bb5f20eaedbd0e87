"""Prompt lookup: what followed the last time that the text said this."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from engine.speculation.batch import Batch, Sequence
from engine.speculation.drafters.base import Draft, Drafter

#: Tokens of the text's end that are looked for, longest first. One token alone says too little.
LONGEST, SHORTEST = 4, 2


class SuffixIndex:
    """A growing text and, for each of its n-grams, what came after the newest one that something came after.

    Appending a token and looking one up both take O(LONGEST²) steps, however long the text is.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in ids:
            # Only now does something follow the n-grams at the end: the text never finds its own last words.
            for suffix in self._suffixes():
                self._after[suffix] = len(self._ids)
            self._ids.append(token)

    def continuation(self, k: int) -> list[int]:
        """k tokens that followed the longest known suffix, or none if no suffix is known.

        What followed may reach the text's end before k tokens: then it goes on with itself, as a loop would.
        """
        end = len(self._ids)
        for suffix in self._suffixes():
            start = self._after.get(suffix)
            if start is not None:
                return [self._ids[start + i % (end - start)] for i in range(k)]
        return []

    def _suffixes(self) -> Iterable[tuple[int, ...]]:
        """The text's last LONGEST … SHORTEST tokens."""
        end = len(self._ids)
        return (tuple(self._ids[end - n :]) for n in range(min(LONGEST, end), SHORTEST - 1, -1))


class NgramDrafter(Drafter):
    """Copies from the prompt and the text so far (prompt lookup decoding, Saxena 2023). No model, no routes.

    It is certain of what it says: q is one-hot, so that sampling accepts a token with the target's probability.
    """

    def __init__(self) -> None:
        self._texts: dict[int, SuffixIndex] = {}

    def join(self, sequences: list[Sequence]) -> None:
        """Begin texts of their own."""
        self._texts |= {sequence.slot: SuffixIndex() for sequence in sequences}

    def draft(self, batch: Batch, k: int, on_token: Callable[[int], None]) -> Draft:
        found = []
        for sequence, length in zip(batch.sequences, batch.draft_lengths(k).tolist(), strict=True):
            text = self._texts.setdefault(sequence.slot, SuffixIndex())
            text.extend(sequence.since(len(text)))
            found.append(text.continuation(length))
        longest = max(map(len, found))
        if not longest:
            return Draft.empty(len(found))
        on_token(longest - 1)
        tokens = torch.zeros(len(found), longest, dtype=torch.long)
        for row, ids in zip(tokens, found, strict=True):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.long)
        lengths = torch.tensor([len(ids) for ids in found])
        counted = (torch.arange(longest) < lengths[:, None]).float()
        return Draft(tokens, None, lengths, counted)
