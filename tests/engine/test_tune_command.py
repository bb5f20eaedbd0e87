"""`tune` from the command line on a tiny model: the table, the profile, and `generate --profile`."""

from __future__ import annotations

import json

import pytest

from engine.cli import main
from engine.errors import UsageError
from engine.tune.profile import load_profile

LINK = ["--link", "emulated:0.05"]


@pytest.fixture(scope="module")
def tuned(tiny_model, tmp_path_factory):
    """(the directory of the model, the profile, what --json printed)."""
    model, out = str(tiny_model("mixtral").directory), tmp_path_factory.mktemp("tune") / "profile.json"
    command = ["tune", "--model", model, *LINK, "--memory", "60%", "--batch", "2", "--k", "3", "--seconds", "5"]
    assert main([*command, "--threads", "1", "--out", str(out)]) == 0
    return model, out


def test_it_keeps_what_is_fixed_and_what_memory_holds(tuned):
    found = json.loads(tuned[1].read_text())
    assert {row["batch"] for row in found["rows"]} == {2}
    assert {row["k"] for row in found["rows"]} == {3}
    assert len({row["draft"] for row in found["rows"]}) > 1
    for row in found["rows"]:
        assert row["draft_bytes"] + row["cache_bytes"] + row["kv_bytes"] <= found["memory_limit"]
    played = {row["measured_tokens_per_s"]: row for row in found["rows"] if row["measured_tokens_per_s"]}
    best = played[max(played)]
    assert {name: best[name] for name in ("draft", "prefetch", "k", "batch")} == {
        name: found["chosen"][name] for name in ("draft", "prefetch", "k", "batch")
    }


def test_generate_runs_with_the_profile_and_options_win(tuned, capsys):
    model, out = tuned
    command = ["generate", "--profile", str(out), "--prompt", "Once upon a time", "--max-new-tokens", "4", "--json"]
    chosen = load_profile(out)
    assert main(command) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["model"], config["draft"], config["k"]) == (model, chosen.draft, 3)
    assert (config["prefetch"], config["batch"]) == (chosen.prefetch, 2)
    assert main([*command, "--k", "1", "--draft", "self-int2"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["draft"], config["k"], config["batch"]) == ("self-int2", 1, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda found: found | {"kind": "something"}, "is no profile"),
        (lambda found: found | {"version": 99}, "version 99"),
        (lambda found: {k: v for k, v in found.items() if k != "chosen"}, "damaged"),
        (lambda found: found | {"chosen": found["chosen"] | {"k": 99}}, "k 99 is out of range"),
        (lambda found: found | {"chosen": found["chosen"] | {"cache_bytes": -1}}, "must be positive"),
        (lambda found: found | {"chosen": found["chosen"] | {"colour": "red"}}, "colour"),
        (lambda found: [found], "is no profile"),
    ],
)
def test_a_damaged_profile_is_refused(tuned, tmp_path, change, told):
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(change(json.loads(tuned[1].read_text()))))
    with pytest.raises(UsageError, match=told):
        load_profile(damaged)


def test_a_profile_that_is_cut_off_is_refused(tuned, tmp_path, capsys):
    cut = tmp_path / "cut.json"
    cut.write_text(tuned[1].read_text()[:200])
    assert main(["generate", "--profile", str(cut), "--prompt", "x"]) == 2
    assert "write one with tune --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "4"], "share"),
        (["--draft", "none", "--k", "3"], "needs a draft"),
        (["--draft", "ngram", "--prefetch", "draft"], "does not tell"),
        (["--k", "0", "--prefetch", "draft"], "needs a draft"),
        (["--k", "x"], "neither a number"),
        (["--batch", "0"], "out of range"),
        (["--seconds", "0"], "out of range"),
        (["--prefetch", "next-layer"], "cannot fix"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, told, capsys):
    assert main(["tune", *options]) == 2
    assert told in capsys.readouterr().err


def test_too_little_memory_says_what_would_fit(tuned, capsys):
    command = ["tune", "--model", tuned[0], *LINK, "--seconds", "5", "--batch", "2"]
    assert main([*command, "--memory", "1KiB"]) == 1
    told = capsys.readouterr().err
    assert "the least that fits is --memory" in told
