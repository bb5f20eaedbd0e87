"""The stills say what the metrics say, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specviz import figures
from specviz.metrics import Metrics, reduce

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> dict:
    lines = (GOLDEN / f"{name}.ndjson").read_text(encoding="utf-8").splitlines()
    return reduce(json.loads(line) for line in lines).to_json()


def trace(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def test_acceptance_shows_rates_and_their_n():
    bars = trace(figures.acceptance(golden("hand")), "accepted")
    assert list(bars.y) == [100, 0]
    assert list(bars.text) == ["n 1", "n 1"]


def test_roofline_shows_points_under_both_roofs():
    figure = figures.roofline(golden("hand"))
    assert list(trace(figure, "rounds").x) == [2 / 200 * 1e6]
    link = trace(figure, "link roof")
    assert link.y[0] / link.x[0] == pytest.approx(1e8 / 1e6)
    assert set(trace(figure, "compute roof").y) == {384615.0}
    assert list(trace(figure, "predicted Θ(k)").y) == [200000.0, 250000.0, 233333.0]


def test_speed_marks_the_knob():
    figure = figures.speed(golden("hand"))
    assert trace(figure, "whole run").y[-1] == pytest.approx(3 / 8600e-9)
    assert [shape.x0 for shape in figure.layout.shapes] == [8200 / 1e9]


@pytest.mark.parametrize("make", [figures.acceptance, figures.roofline, figures.speed])
def test_stills_name_their_source(make):
    title = make(golden("draft4")).layout.title.text
    assert "stories-moe" in title
    assert "emulated" in title


@pytest.mark.parametrize("make", [figures.acceptance, figures.roofline, figures.speed])
def test_nothing_yet_is_no_error(make):
    assert make(Metrics().to_json()).to_json()


@pytest.mark.parametrize("make", [figures.acceptance, figures.roofline, figures.speed])
def test_no_webgl(make):
    assert not [trace for trace in make(golden("draft4")).data if "gl" in trace.type]
