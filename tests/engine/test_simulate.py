"""The command `simulate`, and the papers' figures beside ours."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine.cli import main
from engine.control.reproduction import moespeq, specmoeoff
from engine.control.reproduction.row import Row
from engine.simulate.reports import reproduce

RECORDING = Path(__file__).resolve().parents[2] / "assets" / "recordings" / "stories.ndjson.gz"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["simulate", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict]:
    return {(row["source"], row["what"]): row for row in reproduce()["rows"]}


def test_every_row_is_ours_or_says_what_is_missing(rows: dict[tuple[str, str], dict]):
    assert len(rows) == len([*specmoeoff.rows(), *moespeq.rows()])  # no two are called the same
    for row in rows.values():
        assert row["inputs"] and row["unit"]
        if row["ours"] is None:
            assert "missing" in row["why"]
            assert row["error"] is None
        else:
            assert row["nearest"] is None
            assert row["error"] == pytest.approx((row["ours"] - row["paper"]) / row["paper"])


@pytest.mark.parametrize(
    ("source", "papers"),
    [
        ("SpecMoEOff, table 3", {5.05, 4.39, 4.29, 3.53, 3.70, 0.56}),
        ("SpecMoEOff, section 6", {1.53, 1.45, 2.1}),
        ("MoE-SpeQ, section 4, Phi-3.5-MoE", {163.1, 351.8, 536.7, 960.5}),
        ("MoE-SpeQ, table 4, DeepSeek-V2-Lite", {13.02, 12.37, 8.88, 8.29}),
        ("MoE-SpeQ, table 3, DeepSeek-V2-Lite",
         {29.2, 61.13, 50.94, 76.56, 95.77, 96.04, 96.33, 95.44, 95.46, 91.98, 95.9, 99.85, 98.62, 96.25}),
    ],
)  # fmt: skip
def test_the_published_figures_are_all_there(rows: dict[tuple[str, str], dict], source: str, papers: set[float]):
    assert papers <= {row["paper"] for (where, _), row in rows.items() if where == source}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("SpecMoEOff, table 3", "target"),
        ("SpecMoEOff, table 3", "draft"),
        ("SpecMoEOff, table 3", "iteration"),
        ("SpecMoEOff, table 3", "transfer"),
        ("MoE-SpeQ, section 4, Phi-3.5-MoE", "Mixtral-Offloading, same cache"),
        ("MoE-SpeQ, table 4, DeepSeek-V2-Lite", "without both"),
        ("MoE-SpeQ, table 2, Qwen1.5-MoE", "draft and target that share nothing"),
    ],
)
def test_these_are_reproduced_within_a_tenth(rows: dict[tuple[str, str], dict], source: str, what: str):
    assert abs(rows[source, what]["error"]) <= 0.10


def test_bounds_are_bounds(rows: dict[tuple[str, str], dict]):
    """What the peaks allow may not be slower than what was measured, else a peak or a count is wrong."""
    bounds = [row for (source, _), row in rows.items() if source == "SpecMoEOff, table 3" and row["ours"] is None]
    assert len(bounds) == 5
    assert all(row["nearest"] < row["paper"] for row in bounds)


def test_figures_by_hand(rows: dict[tuple[str, str], dict]):
    transfer = rows["SpecMoEOff, table 3", "transfer"]["ours"]
    assert transfer == pytest.approx(32 * 8 * 3 * 4096 * 14336 * 2 / 25e9)
    target = rows["SpecMoEOff, table 3", "target"]["ours"]
    assert target == pytest.approx(4.29 + 3.53 / 64)  # the CPU never pauses; then the last micro-batch's experts
    batch = specmoeoff.table_workload().batch
    attention = rows["SpecMoEOff, table 3", "CPU attention"]["nearest"]
    assert attention == pytest.approx(4 * 4096 * 32 * batch * 6 * 576 / 2.43e12)
    same_cache = rows["MoE-SpeQ, section 4, Phi-3.5-MoE", "Mixtral-Offloading, same cache"]["ours"]
    misses = 32 * 2 * (14 / 16)
    assert same_cache == pytest.approx(1e3 * misses * 3 * 4096 * 6400 * 2 / 16e9, rel=0.02)  # and some compute


def test_no_figure_of_ours_knows_the_papers(monkeypatch: pytest.MonkeyPatch, rows: dict[tuple[str, str], dict]):
    """With every published figure a tenth larger ours stay: none is fitted."""
    made = Row.__init__
    monkeypatch.setattr(Row, "__init__", lambda self, source, what, unit, paper, *rest:
                        made(self, source, what, unit, paper * 1.1, *rest))  # fmt: skip
    for row in reproduce()["rows"]:
        before = rows[row["source"], row["what"]]
        assert row["paper"] == pytest.approx(before["paper"] * 1.1)
        assert (row["ours"], row["nearest"]) == (before["ours"], before["nearest"])


def test_rows_refuse_to_be_silent():
    with pytest.raises(ValueError, match="missing"):
        Row("a", "b", "s", 1.0, None, "nothing")
    with pytest.raises(ValueError, match="stands in"):
        Row("a", "b", "s", 1.0, 1.0, "all", nearest=1.0)


def test_reproduce_prints_the_same_twice(capsys: pytest.CaptureFixture[str]):
    status, text, _ = run(capsys, "--reproduce")
    assert (status, text) == (0, run(capsys, "--reproduce")[1])
    report = json.loads(run(capsys, "--reproduce", "--json")[1])
    assert all(row["what"] in text and row["inputs"] in text for row in report["rows"])
    counts = report["counts"]
    assert counts["given"] + counts["input_missing"] == counts["figures"] == len(report["rows"])
    assert f"{counts['within_10_percent']} of them within 10 %" in text


def test_policies_in_a_table_and_as_json(capsys: pytest.CaptureFixture[str]):
    arguments = ("--hardware", "a30", "--model", "mixtral-8x7b", "--batch", "16", "--k", "5")
    status, text, _ = run(capsys, *arguments)
    assert status == 0
    report = json.loads(run(capsys, *arguments, "--json")[1])
    assert [row["policy"] for row in report["policies"]] == [
        "on demand",
        "MoE-SpeQ",
        "streamed, no draft",
        "SpecMoEOff",
    ]
    assert all(row["policy"] in text and row["reason"] in text for row in report["policies"])
    offloaded = report["policies"][-1]
    assert offloaded["binds"] == "link"
    assert offloaded["tokens_per_second"] == pytest.approx(offloaded["tokens"] / offloaded["iteration_s"])
    speq = report["policies"][1]
    assert speq["iteration_s"] is None and "does not fit" in speq["reason"]  # 21.7 GiB of INT4 experts
    assert {point["phase"] for point in report["roofline"]} > {"draft", "verify attention", "experts"}
    assert report["turning_points"]["saturate"] > 0


def test_a_machine_without_gpu_has_a_disk_and_no_turning_points(capsys: pytest.CaptureFixture[str]):
    report = json.loads(run(capsys, "--hardware", "space-2core", "--model", "olmoe-1b-7b", "--json")[1])
    assert report["turning_points"] is None
    assert set(report["policies"][-1]["busy"]) == {"cpu", "disk"}


def test_batch_max_is_what_host_memory_holds(capsys: pytest.CaptureFixture[str]):
    report = json.loads(run(capsys, "--batch", "max", "--k", "0", "--json")[1])
    assert report["workload"]["batch"] == int((250 * 2**30 - 32 * 8 * 3 * 4096 * 14336 * 2) // (640 * 128 * 1024))


def test_recorded_routing_belongs_to_its_model(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "run.ndjson"
    path.write_bytes(gzip.decompress(RECORDING.read_bytes()))
    arguments = ("--hardware", "a100-40gb", "--model", "phi-3.5-moe", "--json")  # 2 of 16 experts, like the recording
    uniform = json.loads(run(capsys, *arguments)[1])["policies"][1]
    recorded = json.loads(run(capsys, *arguments, "--routing", str(path))[1])["policies"][1]
    assert recorded["tokens_per_second"] > uniform["tokens_per_second"]
    status, _, error = run(capsys, "--routing", str(path))
    assert status == 2 and "2 of 8" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hardware", "abacus"), "use one of 4090d"),
        (("--model", "abacus"), "mixtral-8x7b"),
        (("--batch", "many"), "nor max"),
        (("--batch", "0"), "at least 1"),
        (("--acceptance", "2"), "between 0 and 1"),
        (("--routing", "nowhere"), "--trace"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], message: str):
    status, out, error = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in error and error.count("\n") == 1
