"""Whether two models speak of the same tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from engine.errors import ModelError


def check_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, name: str) -> None:
    """Raise ModelError unless every id that has a token in either tokenizer has the same one in both.

    Embeddings may differ in size: rows beyond the last token are padding. `name` is the draft model's.
    """
    ours, theirs = (tokens_by_id(tokenizer) for tokenizer in (target, draft))
    differing = [number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number)]
    if differing:
        first = min(differing)
        raise ModelError(
            f"{name} has another vocabulary: token {first} is {_said(theirs.get(first))} there and "
            f"{_said(ours.get(first))} in the target, and {len(differing)} tokens differ in all: choose a draft model "
            "with the target's tokenizer"
        )


def tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """id → token as it is stored, those that were added to the tokenizer included."""
    return {number: token for token, number in tokenizer.get_vocab().items()}


def _said(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
