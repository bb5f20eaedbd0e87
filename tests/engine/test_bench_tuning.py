"""The suite that holds `tune` to the machine: what it compares with what, and what it prints. No speeds."""

from __future__ import annotations

import json

import pytest

from engine.bench.tuning import SWEPT_K, format_tuning, tuning_suite
from engine.config import EngineConfig, LinkConfig
from engine.tune.space import Fixed


@pytest.fixture(scope="module")
def report(tiny_model) -> dict:
    config = EngineConfig(model=str(tiny_model("mixtral").directory), link=LinkConfig("emulated", gbps=0.05), threads=1)
    return tuning_suite(config, 5.0, lambda line: None, Fixed(batch=2, draft="sparse"))


def test_what_is_swept_was_not_measured_before(report):
    assert json.loads(json.dumps(report)) == report
    assert {row["k"] for row in report["rows"]} == set(SWEPT_K)
    assert {row["batch"] for row in report["rows"]} == {2}
    assert report["best"]["k"] in SWEPT_K


def test_the_bars_follow_from_the_rows(report):
    bars = {bar["name"]: bar for bar in report["bars"]}
    errors = sorted(abs(row["predicted_s"] / row["measured_s"] - 1) for row in report["rows"])
    middle = len(errors) // 2
    median = errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    assert bars["median error of the predicted round"]["value"] == pytest.approx(median)
    assert not bars["settings predicted and measured"]["holds"]
    rates = [report[name]["tokens_per_s"] for name in ("choice", "best")]
    assert bars["tune's choice, share of the sweep's best"]["value"] == pytest.approx(rates[0] / max(rates))


def test_the_table_has_a_line_a_setting(report):
    text = format_tuning(report)
    assert text.count("sparse  ") >= len(report["rows"])
    assert "tune's choice: sparse" in text
