"""Rates and times left of loading: against arithmetic."""

from __future__ import annotations

import io

import pytest

from engine.cli import _progress_line, main
from engine.progress import WINDOW_S, Pace, describe

MIB = 2**20


def test_a_steady_stage_has_its_rate():
    pace = Pace()
    assert pace.rate("packing experts", 0, 100.0) is None
    assert pace.rate("packing experts", 10, 100.1) is None  # too short to say
    for tenth in range(2, 200):
        rate = pace.rate("packing experts", 10 * tenth, 100 + tenth / 10)
    assert rate == pytest.approx(100)


def test_the_rate_is_that_of_the_last_seconds():
    """A resumed build races through what it only checks."""
    pace = Pace()
    for second in range(10):
        pace.rate("packing experts", 1000 * second, second)
    for second in range(10, 10 + int(WINDOW_S) + 1):
        rate = pace.rate("packing experts", 9000 + 10 * (second - 9), second)
    assert rate == pytest.approx(10)


def test_another_stage_starts_anew():
    pace = Pace()
    pace.rate("shared weights", 0, 0.0)
    assert pace.rate("shared weights", 10, 1.0) == 10
    assert pace.rate("packing experts", 0, 1.1) is None
    assert pace.rate("packing experts", 30, 2.1) == pytest.approx(30)


@pytest.mark.parametrize(
    ("done", "rate", "text"),
    [
        (0, None, "packing experts   0% of 512 MiB"),
        (128 * MIB, 64.0 * MIB, "packing experts  25% of 512 MiB · 64 MiB/s · 6 s left"),
        (128 * MIB, 4.0 * MIB, "packing experts  25% of 512 MiB · 4 MiB/s · 1:36 min left"),
        (0, 0.1 * MIB, "packing experts   0% of 512 MiB · 0 MiB/s · 1:25 h left"),
    ],
)
def test_what_is_said(done: int, rate: float | None, text: str):
    assert describe("packing experts", done, 512 * MIB, rate) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_line_that_goes_away():
    terminal = Terminal()
    show = _progress_line(terminal)
    show("shared weights", 0, 0)
    show("packing experts", MIB, 4 * MIB)
    show("packing experts", 4 * MIB, 4 * MIB)
    assert terminal.getvalue().split("\r\x1b[K") == ["", "shared weights", "packing experts  25% of 4 MiB", ""]


def test_an_error_takes_the_place_of_the_progress(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    _progress_line(terminal)("shared weights", 0, 0)
    assert main(["dance"]) == 2
    _, progress, error = terminal.getvalue().split("\r\x1b[K")
    assert progress == "shared weights"
    assert error.startswith("error: ") and error.count("\n") == 1
