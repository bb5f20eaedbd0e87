"""Drafters that are wrong, right, or broken: the text is the target's own, and who cannot draft is switched off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from recorded_runs import Recording, record
from tiny_models import PROMPTS, VOCAB, greedy

from engine import events
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.kv_cache import KVCache
from engine.model.text import TextStream
from engine.speculation.batch import Batch, Sequence
from engine.speculation.drafters import Draft, Drafter, DraftRun
from engine.speculation.seam import flaw
from engine.speculation.watch import DraftWatch

NEW_TOKENS, K = 40, 4
#: Different lengths: the batch is ragged from the first round on.
BATCH = PROMPTS[:5]


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    engine = Engine.load(EngineConfig(model=str(tiny_model("mixtral").directory), draft="self-int2"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(tiny_model) -> list[list[int]]:
    model = tiny_model("mixtral")
    return greedy(model.reference(), model.directory, BATCH, NEW_TOKENS)


class Scripted(Drafter):
    """Proposes what `say(slot, position, wanted)` says, for the tokens from `position` of the new text on."""

    def __init__(self, run: DraftRun, say: Callable[[int, int, int], list[int]]) -> None:
        self._vocab, self._say = run.vocab, say

    def draft(self, batch: Batch, k: int, on_token: Callable[[int], None]) -> Draft:
        wanted = batch.draft_lengths(k).tolist()
        said = [self._say(s.slot, len(s.new_ids), n) for s, n in zip(batch.sequences, wanted, strict=True)]
        return drafted(said, self._vocab)


def drafted(said: list[list[int]], vocab: int, padding: int = -7) -> Draft:
    """A draft that is certain of each token; what lies beyond a sequence's length is nonsense."""
    longest = max(map(len, said))
    tokens = torch.tensor([ids + [padding] * (longest - len(ids)) for ids in said], dtype=torch.long)
    tokens = tokens.reshape(len(said), longest)
    probs = torch.nn.functional.one_hot(tokens.clamp(0, vocab - 1), vocab).float()
    return Draft(tokens, probs, torch.tensor([len(ids) for ids in said]), torch.ones(tokens.shape))


@pytest.fixture
def drafts_with(engine, monkeypatch) -> Callable[..., Recording]:
    """drafts_with(say) → a run of the batch whose drafter proposes that."""

    def run(say: Callable[[int, int, int], list[int]], **options) -> Recording:
        monkeypatch.setattr(Engine, "_create_drafter", lambda self, run: Scripted(run, say))
        return record(engine, list(BATCH), **{"max_new_tokens": NEW_TOKENS, "k": K, **options})

    return run


def alarms(recording: Recording) -> list[str]:
    """The reasons, which the results must tell, too."""
    reasons = [event.reason for event in recording.of(events.DraftAlarm)]
    assert {result["draft_alarm"] for result in recording.results} == set(reasons or [None])
    return reasons


def test_always_right(drafts_with, expected):
    """An oracle: every round but the last brings k + 1 tokens."""
    recording = drafts_with(lambda slot, at, n: expected[slot][at : at + n])
    assert recording.ids == expected and alarms(recording) == []
    assert recording.results[0]["acceptance_rate"] == 1.0
    rounds = [event for event in recording.of(events.Round) if event.sequence == 0]
    assert [len(event.tokens) for event in rounds] == [K + 1] * (NEW_TOKENS // (K + 1))


def test_always_wrong(drafts_with, expected):
    """Every first token is rejected: the drafter is off after so many, and the rest is decoded plainly."""
    recording = drafts_with(lambda slot, at, n: [(token + 1) % VOCAB for token in expected[slot][at : at + n]])
    assert recording.ids == expected
    (reason,) = alarms(recording)
    assert "mixtral" not in reason and "0 of 35 first tokens were accepted" in reason
    (alarm,) = recording.of(events.DraftAlarm)
    assert (alarm.round, alarm.draft) == (7, "self-int2")
    for event in recording.of(events.Round):
        assert (event.drafted > 0) == (event.round <= alarm.round)
    for choice in recording.of(events.GovernorChoice):
        assert choice.k == (K if choice.round <= alarm.round else 0)
        assert (choice.reason == reason) == (choice.round > alarm.round)


def test_what_is_switched_off_still_takes_its_memory(engine, drafts_with, expected):
    with_alarm = drafts_with(lambda slot, at, n: [VOCAB] * n)
    assert alarms(with_alarm)
    start = with_alarm.of(events.RunStart)[0]
    assert with_alarm.results[0]["memory"] == start.memory


def test_fewer_than_asked_for(drafts_with, expected):
    """None, one, or all of them, another number for each sequence and round."""
    recording = drafts_with(lambda slot, at, n: expected[slot][at : at + (slot + at) % (n + 1)])
    assert recording.ids == expected and alarms(recording) == []
    drafted = {event.drafted for event in recording.of(events.Round)}
    assert drafted == set(range(K + 1))


def test_right_at_first_then_wrong(drafts_with, expected):
    """Where a draft turns wrong differs by sequence: lengths of the KV cache drift apart and stay right."""

    def say(slot: int, at: int, n: int) -> list[int]:
        right = expected[slot][at : at + n]
        turn = (slot + at) % (K + 1)
        return [token if i < turn else (token + 1) % VOCAB for i, token in enumerate(right)]

    recording = drafts_with(say)
    assert recording.ids == expected
    assert {event.accepted for event in recording.of(events.Round) if event.drafted == K} == set(range(K + 1))


BROKEN: dict[str, tuple[Callable[[int, int, int], list[int]], str]] = {
    "beyond the vocabulary": (lambda slot, at, n: [VOCAB] * n, f"token {VOCAB}, and the vocabulary has {VOCAB}"),
    "far beyond": (lambda slot, at, n: [2**40] * n, f"token {2**40}"),
    "negative": (lambda slot, at, n: [5] * (n - 1) + [-1] if n else [], "token -1"),
    "one sequence only": (lambda slot, at, n: [VOCAB if slot == 3 else 5] * n, f"token {VOCAB}"),
    "more than asked": (lambda slot, at, n: [5] * (n + 1), f"{K + 1} tokens where {K} were asked for"),
    "more in one sequence": (lambda slot, at, n: [5] * (n + 9 * (slot == 2)), f"{K + 9} tokens where {K}"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_drafts_are_refused(what, drafts_with, expected):
    say, reason = BROKEN[what]
    recording = drafts_with(say)
    assert recording.ids == expected
    (told,) = alarms(recording)
    assert reason in told and "bug of the drafter" in told
    assert all(event.drafted == 0 for event in recording.of(events.Round))


def test_breaking_late_in_the_run(drafts_with, expected):
    """A round that was asked for no draft, because nothing more fits, gets one all the same."""
    recording = drafts_with(
        lambda slot, at, n: expected[slot][at : at + n] if n == K else [5] * K, max_new_tokens=NEW_TOKENS - 2
    )
    assert recording.ids == [ids[:-2] for ids in expected]
    (reason,) = alarms(recording)
    assert "4 tokens where 2 were asked for" in reason


def test_the_next_run_drafts_again(drafts_with, expected):
    assert alarms(drafts_with(lambda slot, at, n: [VOCAB] * n))
    again = drafts_with(lambda slot, at, n: expected[slot][at : at + n])
    assert again.ids == expected and alarms(again) == []


def one_sequence(remaining: int = 8) -> Batch:
    sequence = Sequence(0, [1, 2], remaining, TextStream.__new__(TextStream))
    return Batch([sequence], KVCache(1, 1, 16))


GOOD = drafted([[3, 4, 5]], 10)
Q = torch.zeros(1, 3, 10)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"lengths": torch.tensor([2])}, None),
        ({"lengths": torch.tensor([0])}, None),
        ({"lengths": torch.tensor([4])}, "lengths"),
        ({"lengths": torch.tensor([-1])}, "lengths"),
        ({"lengths": torch.tensor([3, 3])}, "lengths"),
        ({"probs": torch.zeros(1, 3, 9)}, "do not fit"),
        ({"confidence": torch.ones(1, 2)}, "do not fit"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.long)}, "do not fit"),
        ({"probs": Q}, "not a distribution"),
        ({"probs": Q + float("nan")}, "not a distribution"),
        ({"probs": GOOD.probs * 2}, "not a distribution"),
        ({"probs": GOOD.probs.roll(1, -1)}, "not a distribution"),  # sure of other tokens
        ({"probs": GOOD.probs * 1.5 - 0.05}, "not a distribution"),
    ],
)
def test_flaws(change, reason):
    found = flaw(dataclasses.replace(GOOD, **change), one_sequence(), 3, 10)
    assert found is None if reason is None else found is not None and reason in found


def test_a_flaw_by_what_still_fits():
    assert flaw(GOOD, one_sequence(remaining=4), 8, 10) is None
    assert "3 tokens where 2 were asked for" in str(flaw(GOOD, one_sequence(remaining=3), 8, 10))


def test_watch_gives_up_at_the_31st_wrong_token():
    watch = DraftWatch()
    for _ in range(30):
        watch.observe([(1, 0)])
        watch.observe([(0, 0)])  # nothing drafted: nothing learned
    assert not watch.hopeless
    watch.observe([(4, 0)])
    assert watch.hopeless and (watch.tried, watch.right) == (31, 0)


@pytest.mark.parametrize(("right", "most"), [(0.15, 0.01), (0.5, 0.0005)])
def test_watch_spares_useful_drafters(right: float, most: float):
    """Wald's bound, looked at after every token: the share given up wrongly. (Monte Carlo: 1.5 times it at most.)"""
    generator = torch.Generator().manual_seed(0)
    runs = torch.rand(4000, 400, generator=generator) < right
    step = torch.where(runs, torch.tensor(0.15 / 0.01).log(), torch.tensor(0.85 / 0.99).log())
    assert ((step.cumsum(1) < torch.tensor(0.01).log()).any(1).float().mean()) <= 1.5 * most
    lost = 0
    for run in runs[:300].tolist():
        watch = DraftWatch()
        for hit in run:
            watch.observe([(1, int(hit))])
            if watch.hopeless:
                lost += 1
                break
    assert lost <= 300 * 4 * most + 1
