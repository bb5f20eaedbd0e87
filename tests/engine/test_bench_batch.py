"""The batch suite: that its figures follow from what the runs did, and its comparison is fair. No speeds."""

from __future__ import annotations

import dataclasses
import json

import pytest

from engine import events
from engine.bench import batch as suite
from engine.bench.batch import ALONE, OURS, PLAIN, batch_suite, format_batch
from engine.bench.batch_run import BatchRun, LinkWatch, batch_row
from engine.bench.contenders import Contender
from engine.bench.prompts import many_prompts
from engine.cli import main
from engine.config import EngineConfig, LinkConfig

BATCH, TOKENS = 5, 6


@pytest.fixture(scope="module")
def report(tiny_model) -> dict:
    config = EngineConfig(model=str(tiny_model("mixtral").directory), link=LinkConfig.parse("emulated:50"), threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "TRIAL_K", (2, 3))
        patch.setattr(suite, "TRIAL_TOKENS", 8)
        return batch_suite(config, BATCH, TOKENS, 1, lambda line: None)


def bars(report: dict) -> dict[str, dict]:
    return {bar["name"]: bar for bar in report["bars"]}


def test_the_report(report: dict):
    assert json.loads(json.dumps(report)) == report
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == [PLAIN, OURS, ALONE]
    assert [(row["batch"], row["prompts"]) for row in rows.values()] == [(BATCH, BATCH), (BATCH, BATCH), (1, 4)]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / rows[PLAIN]["tokens_per_s"])
        assert 0 < row["link_busy"] <= 1
        assert row["draft_s"] + row["verify_s"] + row["stall_s"] <= row["round_s"]
        assert row["full_ratio"] == pytest.approx(row["full_tokens_per_s"] / rows[PLAIN]["full_tokens_per_s"])
    assert rows[PLAIN]["mean_acceptance_length"] is None and rows[OURS]["mean_acceptance_length"] >= 1
    asked = {name: bar["bar"] for name, bar in list(bars(report).items())[:3]}
    assert asked == {
        f"times {PLAIN}, all 5 decoding": 2.5, f"times {PLAIN}, whole run": 2.5, f"times {ALONE}, whole run": 4.0,
    }  # fmt: skip
    assert bars(report)[f"times {PLAIN}, whole run"]["value"] == pytest.approx(rows[OURS]["ratio"])
    text = format_batch(report)
    for line in (*rows, *bars(report), "4 of the 5 prompts", *(trial["draft"] or "none" for trial in report["trials"])):
        assert line in text


def test_all_have_the_same_memory_and_the_same_texts(report: dict):
    assert bars(report)["draft and cache, share of the experts' bytes"]["holds"]
    assert bars(report)["different outputs at temperature 0"]["value"] == 0
    plain, ours, alone = report["rows"]
    slot = plain["draft_and_cache"] / plain["slots"]
    assert plain["draft_and_cache"] - slot < ours["draft_and_cache"] <= plain["draft_and_cache"]
    assert plain["draft_and_cache"] - slot < alone["draft_and_cache"] <= plain["draft_and_cache"]


def test_the_fastest_of_the_trials_competes(report: dict):
    together = [trial for trial in report["trials"] if trial["batch"] == BATCH]
    best = max(together, key=lambda trial: trial["tokens_per_s"])
    ours = report["rows"][1]
    assert (ours["draft"], ours["k"], ours["slots"]) == (best["draft"], best["k"], best["slots"])
    assert {trial["draft"] for trial in together} == {"sparse", "sparse-1", "self-int4"}
    alone = [trial for trial in report["trials"] if trial["batch"] == 1]
    assert {(trial["draft"], trial["k"]) for trial in alone} >= {(None, 0)}


def moved(start: int, end: int, pauses: list[list[int]] | None = None) -> events.Transfer:
    return events.Transfer(end, 1, 1, 0, 0, "prefetch", start, start, end, 8, pauses or [])


def decoded(number: int, start: int, end: int) -> events.Round:
    return events.Round(end, number, 0, 0, 0, 0, 0, [], [], start, start, start, end, 0)


def test_the_link_is_busy_when_anything_moves():
    """Two at a time count once, pauses do not count, and nothing before or after the rounds does."""
    watch = LinkWatch()
    for event in (decoded(1, 100, 200), decoded(2, 200, 300), moved(50, 120), moved(110, 150),
                  moved(160, 260, [[180, 240]]), moved(290, 400)):  # fmt: skip
        watch.hear(event)
    assert watch.wall == (100, 300)
    assert watch.busy == [(100, 150), (160, 180), (240, 260), (290, 300)]


def test_a_batch_is_full_until_the_first_one_ends():
    """Two sequences: three tokens in two rounds of both, then one more of the second alone."""
    watch = LinkWatch()
    token = events.Token(1, "a", "plain", 0, 1.0)
    for number, sequence, count in ((1, 0, 1), (1, 1, 1), (2, 0, 0), (2, 1, 1), (3, 1, 1)):
        at = decoded(number, 100 * number, 100 * number + 50)
        watch.hear(dataclasses.replace(at, sequence=sequence, tokens=[token] * count))
    assert watch.full(2) == (3, 150e-9)


def test_what_binds_is_what_a_round_has_more_of():
    def row(link_s: float, draft_s: float) -> dict:
        run = BatchRun(2, 40, 4.0, 30, 2.0, 10, draft_s, 1.0, 0.5, link_s, 800, 0.1, 3.0, 5, 100, 200, [])
        return batch_row(Contender(OURS, EngineConfig(), 4), [run, run], [run])

    assert row(3.0, 1.0)["binds"] == "link" and row(1.5, 1.0)["binds"] == "compute"
    figures = row(3.0, 1.0)
    assert (figures["tokens_per_s"], figures["ratio"], figures["link_busy"]) == (10.0, 1.0, 0.75)
    assert (figures["full_tokens_per_s"], figures["full_ratio"]) == (15.0, 1.0)
    assert (figures["round_s"], figures["bytes_per_round"]) == (0.4, 80)
    assert figures["link_bytes_per_s"] == pytest.approx(800 / 3)


def test_prompts_are_different():
    assert len(set(many_prompts(40))) == 40 and many_prompts(20)[:16] == many_prompts(16)


def test_a_batch_of_one_is_wrong_usage(capsys):
    assert main(["bench", "--suite", "batch", "--batch", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err
