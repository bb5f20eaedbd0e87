"""Where a text ends: at its length, at the end-of-text token, at a stop string; also in the middle of a draft."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from recorded_runs import Recording, record
from tiny_models import PROMPTS, greedy

from engine import events
from engine.config import CacheBudget, EngineConfig
from engine.engine import Engine

STORY = "Once upon a time, there was a little girl named Lily who"
TOKENS = 32


@pytest.fixture(scope="module")
def tiny(tiny_model) -> Iterator[Engine]:
    engine = Engine.load(EngineConfig(model=str(tiny_model("qwen3_moe").directory)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(tiny_model) -> list[list[int]]:
    """Transformers' own output for eight prompts."""
    model = tiny_model("qwen3_moe")
    return greedy(model.reference(), model.directory, PROMPTS[:8], TOKENS)


@pytest.fixture(scope="module")
def storyteller(embedded_model) -> Iterator[Engine]:
    engine = Engine.load(EngineConfig(model=str(embedded_model), cache=CacheBudget(share=1.0)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def story(storyteller) -> Recording:
    return record(storyteller, [STORY], max_new_tokens=TOKENS, k=8)


def streamed(recording: Recording, sequence: int = 0) -> str:
    """What a person saw, token by token."""
    rounds = [event for event in recording.of(events.Round) if event.sequence == sequence]
    return "".join(token.text for event in rounds for token in event.tokens)


@pytest.mark.parametrize("limit", range(1, 11))
def test_length_is_exact(limit: int, tiny, expected):
    recording = record(tiny, list(PROMPTS[:8]), max_new_tokens=limit, k=8)
    assert recording.ids == [ids[:limit] for ids in expected]
    for sequence, result in enumerate(recording.results):
        assert (result["new_tokens"], result["finish_reason"]) == (limit, "length")
        assert streamed(recording, sequence) == result["text"]


def test_a_context_is_used_to_its_last_token(tiny, tiny_model):
    model, prompt = tiny_model("qwen3_moe"), "a" * 250
    room = 256 - len(tiny.loaded.tokenizer(prompt)["input_ids"])
    assert 0 < room < 256
    recording = record(tiny, [prompt], max_new_tokens=room, k=8)
    assert recording.ids == greedy(model.reference(), model.directory, (prompt,), room)
    assert len(recording.ids[0]) == room


@pytest.mark.parametrize("k", (0, 3, 8))
def test_end_of_text_anywhere_in_a_draft(k: int, tiny, expected, monkeypatch):
    """Each of the tokens that a model emits is made the end of text in turn."""
    for ids in expected[:4]:
        for end in dict.fromkeys(ids[:9]):
            monkeypatch.setattr(tiny.loaded, "eos_ids", frozenset([end]))
            recording = record(tiny, [PROMPTS[expected.index(ids)]], max_new_tokens=TOKENS, k=k)
            result = recording.results[0]
            cut = ids[: ids.index(end) + 1]
            assert (result["token_ids"], result["finish_reason"]) == (cut, "eos")
            assert result["text"] == tiny.loaded.tokenizer.decode(cut[:-1]) == streamed(recording)


def test_sequences_of_a_batch_finish_at_different_times(tiny, expected, monkeypatch):
    ends = frozenset(ids[length] for length, ids in zip((2, 20, 9, 5), expected, strict=False))
    monkeypatch.setattr(tiny.loaded, "eos_ids", ends)
    recording = record(tiny, list(PROMPTS[:8]), max_new_tokens=TOKENS, k=4)
    cut = [ids[: next((i for i, x in enumerate(ids) if x in ends), TOKENS - 1) + 1] for ids in expected]
    assert recording.ids == cut
    assert len({len(ids) for ids in cut}) >= 3, "they should end at different times"
    last_round = {event.sequence: event.round for event in recording.of(events.Round)}
    rounds = {(event.sequence, event.round) for event in recording.of(events.Round)}
    assert len(rounds) == len(recording.of(events.Round))
    assert all((s, r) in rounds for s, last in last_round.items() for r in range(1, last + 1))
    assert len(set(last_round.values())) >= 3
    assert [result["finish_reason"] for result in recording.results] == [
        "eos" if ids[-1] in ends else "length" for ids in cut
    ]


def test_stop_strings_never_leak(storyteller, story):
    """Strings that end at each place of the text: in the middle of a token, of a draft, across tokens."""
    text = story.results[0]["text"]
    assert len(story.of(events.Round)[0].tokens) > 4, "the draft should be good, so that stops fall inside one"
    for end in range(5, len(text), 9):
        stop = text[end - 4 : end]
        recording = record(storyteller, [STORY], max_new_tokens=TOKENS, k=8, stop=("never that", stop))
        result = recording.results[0]
        assert result["text"] == streamed(recording) == text[: text.find(stop)]
        assert result["finish_reason"] == "stop"
        ids = result["token_ids"]
        assert ids == story.ids[0][: len(ids)]
        whole = storyteller.loaded.tokenizer.decode(ids)
        assert stop in whole and stop not in storyteller.loaded.tokenizer.decode(ids[:-1])


def test_a_stop_string_that_only_begins_is_shown_at_the_end(storyteller, story):
    text = story.results[0]["text"]
    recording = record(storyteller, [STORY], max_new_tokens=TOKENS, k=8, stop=(text[-3:] + "\x00",))
    assert recording.results[0]["text"] == streamed(recording) == text
    assert recording.results[0]["finish_reason"] == "length"


def test_the_earliest_of_several_stop_strings_counts(storyteller, story):
    text = story.results[0]["text"]
    early, late = text[12:16], text[30:34]
    assert text.find(early) < text.find(late)
    recording = record(storyteller, [STORY], max_new_tokens=TOKENS, k=8, stop=(late, early))
    assert recording.results[0]["text"] == text[: text.find(early)]


def test_batch_results_are_those_of_each_alone(storyteller, story):
    prompts = [STORY, "Tom had a red kite.", "a"]
    together = record(storyteller, prompts, max_new_tokens=TOKENS, k=4, stop=("the",))
    for prompt, result in zip(prompts, together.results, strict=True):
        alone = record(storyteller, [prompt], max_new_tokens=TOKENS, k="auto", stop=("the",)).results[0]
        for name in ("text", "token_ids", "finish_reason", "prompt_tokens"):
            assert alone[name] == result[name]
