"""Text while it streams: whole characters only, stop strings never shown, linear time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, byte_tokenizer
from transformers import AutoTokenizer

from engine.model.text import TextStream

TOKENIZER = byte_tokenizer()
LETTERS = st.text(alphabet="abc \u00e9\u20ac\U0001f98a\u202e", max_size=24)


def stream(ids: list[int], stop: tuple[str, ...] = (), context: tuple[int, ...] = ()) -> tuple[list[str], bool]:
    """The pieces that a person sees, and whether a stop string ended the text."""
    text = TextStream(TOKENIZER, list(context), stop)
    pieces = []
    for token in ids:
        piece, stopped = text.push(token)
        pieces.append(piece)
        if stopped:
            assert text.text == "".join(pieces)
            return pieces, True
    pieces.append(text.finish())
    assert text.text == "".join(pieces)
    return pieces, False


def naive(ids: list[int], stop: tuple[str, ...]) -> tuple[str, bool]:
    """Decode everything after every token, and cut at the first stop string that is complete."""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count])
        # A character of which only some bytes are there could not be shown.
        text = text if count == len(ids) else text.rstrip("\ufffd")
        found = [text.find(string) for string in stop if string in text]
        if found:
            return text[: min(found)], True
    return TOKENIZER.decode(ids), False


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, stop=st.lists(st.text(alphabet="abc \u20ac", min_size=1, max_size=4), max_size=3))
def test_stop_strings_as_a_naive_reader_would_find_them(text: str, stop: list[str]):
    ids = TOKENIZER(text)["input_ids"]
    pieces, stopped = stream(ids, tuple(stop))
    assert ("".join(pieces), stopped) == naive(ids, tuple(stop))
    for at in range(len(pieces)):
        shown = "".join(pieces[: at + 1])
        assert not any(string in shown for string in stop), "a stop string was shown for a moment"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=40), context=st.lists(st.integers(1, VOCAB - 1), max_size=3))
def test_any_tokens_give_the_text_that_the_tokenizer_gives(ids: list[int], context: list[int]):
    """Also bytes that are no UTF-8, and end-of-text tokens, which show nothing."""
    whole = TOKENIZER.decode([*context, *ids], skip_special_tokens=True)
    before = TOKENIZER.decode(context, skip_special_tokens=True)
    shown = "".join(stream(ids, context=tuple(context))[0])
    if whole.startswith(before) and not before.endswith("\ufffd"):
        assert shown == whole[len(before) :]


@settings(max_examples=100, deadline=None)
@given(text=LETTERS)
def test_pieces_are_whole_characters(text: str):
    pieces, _ = stream(TOKENIZER(text)["input_ids"])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_beginning_is_held_back_until_it_is_known():
    ids = [TOKENIZER(character)["input_ids"][0] for character in "xabab!"]
    pieces, stopped = stream(ids, ("abc", "bab?"))
    assert not stopped
    # The second "a" ends what could have been "abc"; "bab" could be the beginning of either until "!" comes.
    assert pieces == ["x", "", "", "a", "", "bab!", ""]
    assert stream(ids[:-1], ("abc",))[0] == ["x", "", "", "ab", "", "ab"]


def test_spaces_at_word_starts_survive(embedded_model):
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    ids = tokenizer("Once upon a time, there was a fox.")["input_ids"]
    for cut in range(1, len(ids)):
        text = TextStream(tokenizer, ids[:cut])
        shown = "".join(text.push(token)[0] for token in ids[cut:]) + text.finish()
        assert tokenizer.decode(ids[:cut], skip_special_tokens=True) + shown == "Once upon a time, there was a fox."


@pytest.mark.parametrize("stop", ((), ("never this", "nor that")))
def test_time_is_linear(stop: tuple[str, ...], monkeypatch):
    """Counted in tokens that are decoded, not in seconds."""
    decoded = []
    honest = TextStream._decode
    monkeypatch.setattr(TextStream, "_decode", lambda self, ids: decoded.append(len(ids)) or honest(self, ids))
    ids = TOKENIZER("The fox \U0001f98a and the caf\u00e9. " * 120)["input_ids"]
    stream(ids, stop)
    assert len(ids) > 1500 and sum(decoded) < 16 * len(ids)
