"""Bars, and tables for a terminal or a README."""

from __future__ import annotations

from typing import Any


def at_most(name: str, value: float, bar: float) -> dict[str, Any]:
    """A bar that holds while the value is not above it."""
    return {"name": name, "value": value, "bar": bar, "rule": "at most", "holds": value <= bar}


def at_least(name: str, value: float, bar: float) -> dict[str, Any]:
    """A bar that holds while the value is not below it."""
    return {"name": name, "value": value, "bar": bar, "rule": "at least", "holds": value >= bar}


def format_bars(bars: list[dict[str, Any]]) -> list[str]:
    """One line a bar."""
    return [
        f"{'ok ' if bar['holds'] else 'NOT'} {bar['name']}: {bar['value']:.3g} ({bar['rule']} {bar['bar']:g})"
        for bar in bars
    ]


def format_columns(cells: list[list[str]], left: int = 1) -> list[str]:
    """Lines of a table, its first line the heads; the first `left` columns are words, the others numbers."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


#: From this share of the processor on, figures are not to be trusted.
DISTURBED = 0.05


def format_neighbours(machine: dict[str, Any]) -> list[str]:
    """A warning where other programs kept the machine busy during the measurements."""
    share = machine["others_cpu_share"]
    if share is None or share < DISTURBED:
        return []
    return [f"WARNING: other programs used {share:.0%} of the processor meanwhile; run it again on an idle machine."]
