"""The governor suite: what its table holds, and that ratios and bars follow from runs. No speeds are asserted."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from engine.bench import governor as suite
from engine.bench.governor import Contender, format_governor, governor_suite, workloads
from engine.config import EMBEDDED_MODEL, EngineConfig
from engine.control.governor import Governor
from engine.errors import UsageError


@pytest.fixture(scope="module")
def model(tiny_model) -> str:
    return str(tiny_model("mixtral").directory)


@pytest.fixture(scope="module")
def runs() -> list[Contender]:
    """Every contender that the suite measured, as it was at the end."""
    return []


@pytest.fixture(scope="module")
def report(model: str, runs: list[Contender]) -> dict:
    def made(*arguments) -> Contender:
        runs.append(Contender(*arguments))
        return runs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "Contender", made)
        patch.setattr(suite, "PROMPTS", ("Hello", "Once"))
        only = f"{Path(model).name}, 10 GB/s, 50%, T 0.8"
        return governor_suite(EngineConfig(model=model, threads=1), 4, 2, lambda line: None, only)


def test_the_matrix_has_at_least_12_workloads():
    names = [workload.name for workload in workloads(str(EMBEDDED_MODEL))]
    assert len(names) == len(set(names)) >= 12
    links = [workload.gbps for workload in workloads(str(EMBEDDED_MODEL))]
    assert (min(links), max(links)) == (0.1, 10.0)
    assert len(workloads("/models/large")) > len(names)


def test_every_setting_takes_part(report: dict, runs: list[Contender]):
    assert json.loads(json.dumps(report)) == report
    assert [row["temperature"] for row in report["rows"]] == [0.8]
    fixed = ["k = 0", *(f"k = {k}{side}" for k in (1, 2, 4, 8, 16) for side in ("", ", prefetch"))]
    for row in report["rows"]:
        assert list(row["sweep"]) == fixed and all(rate > 0 for rate in row["sweep"].values())
    assert {one.name for one in runs} == {"auto", *fixed}
    governors = {id(one.governor) for one in runs}
    assert len(governors) == len(runs), "auto must not learn from the others' runs"


def test_ratios_follow_from_paired_runs(report: dict, runs: list[Contender]):
    """The final: the governor, plain decoding and the best of the sweep, all prompts as often as there are repeats."""
    per_workload = len(runs) // len(report["rows"])
    for number, row in enumerate(report["rows"]):
        mine = {one.name: one for one in runs[number * per_workload : (number + 1) * per_workload]}
        final = {name: one for name, one in mine.items() if len(one.rates) == 4}
        assert {"auto", "k = 0"} < set(final) and len(final) in (4, 5)
        assert row["best"] == max((n for n in final if n != "auto"), key=lambda n: median(final[n].rates))
        for key, other in (("ratio", row["best"]), ("ratio_to_plain", "k = 0")):
            pairs = zip(final["auto"].rates, final[other].rates, strict=True)
            assert row[key] == pytest.approx(median(a / b for a, b in pairs))
        assert row["prediction_error"] == median(final["auto"].errors) and len(final["auto"].errors) >= 4


def test_three_bars_a_workload(report: dict):
    for row, bars in zip(report["rows"], zip(*[iter(report["bars"])] * 3, strict=True), strict=True):
        assert all(bar["name"].startswith(row["name"]) for bar in bars)
        assert [(bar["value"], bar["bar"], bar["rule"]) for bar in bars] == [
            (row["ratio"], 0.95, "at least"),
            (row["ratio_to_plain"], 0.97, "at least"),
            (row["prediction_error"], 0.15, "at most"),
        ]


def test_the_table_shows_every_workload_and_what_was_missed(report: dict):
    text = format_governor(report)
    for row in report["rows"]:
        assert row["name"] in text and row["best"] in text
    for bar in report["bars"]:
        assert (f"NOT {bar['name']}" in text) == (not bar["holds"])


def test_settings_of_the_knobs_reach_the_engine():
    names = [Contender(k, prefetch, Governor(16, 8, 2)).name for k, prefetch in ((0, "none"), (4, "draft"))]
    assert names == ["k = 0", "k = 4, prefetch"]


def test_a_name_that_fits_no_workload_is_refused(model: str):
    with pytest.raises(UsageError, match="no workload has 'moon'"):
        governor_suite(EngineConfig(model=model), 4, 1, lambda line: None, "moon")
