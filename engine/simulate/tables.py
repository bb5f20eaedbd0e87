"""The reports as tables for a terminal."""

from __future__ import annotations

from typing import Any

from engine.bench.table import format_columns


def format_policies(report: dict[str, Any]) -> str:
    """Tables for a terminal."""
    work = report["workload"]
    cells = [["policy", "iteration", "tokens", "tokens/s", "slots", "what binds"]]
    for row in report["policies"]:
        if row["iteration_s"] is None:
            cells.append([row["policy"], "-", "-", "-", "-", row["reason"]])
            continue
        slots = str(row["slots"]) if row["slots"] else "-"
        cells.append([row["policy"], _seconds(row["iteration_s"]), f"{row['tokens']:.1f}",
                      f"{row['tokens_per_second']:.2f}", slots, row["reason"]])  # fmt: skip
    roofs = [["phase", "on", "FLOP/byte", "moved", "TFLOP/s", "of peak", "limit"]]
    for point in report["roofline"]:
        link = "-" if point["link_intensity"] is None else f"{point['link_intensity']:.1f}"
        roofs.append([point["phase"], point["where"], f"{point['intensity']:.1f}", link, f"{point['tflops']:.3g}",
                      f"{point['utilisation']:.2%}", point["binds"]])  # fmt: skip
    lines = [
        f"{report['model']} on {report['hardware']}: batch {work['batch']}, k = {work['k']}, {work['prompt']} tokens "
        f"and {work['output']} more, {work['acceptance']:.0%} accepted ({work['tokens_per_round']:.2f} tokens a round)",
        "Operators as fast as the profile's roofs allow: no kernel is faster, real ones are slower.",
        "",
        *_left(cells),
        "",
        *format_columns(roofs, left=2),
    ]
    if report["turning_points"]:
        turn = report["turning_points"]
        lines += [
            "",
            f"Below {turn['move']:.1f} FLOP a byte, data in host memory is better computed on the CPU than moved;",
            f"below {turn['saturate']:.0f}, the link limits what the GPU does with moved data.",
        ]
    return "\n".join(lines)


def _left(cells: list[list[str]]) -> list[str]:
    """Columns whose last one is words: those are appended, so that they do not set a width."""
    return [
        f"{line}  {row[-1] if number != 1 else ''}".rstrip()
        for number, (line, row) in enumerate(
            zip(format_columns([row[:-1] for row in cells]), [cells[0], [""], *cells[1:]], strict=True)
        )
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def format_reproduction(report: dict[str, Any]) -> str:
    """The table, then for each figure its inputs and what lacks."""
    cells = [["source", "what", "unit", "paper", "ours", "error", "nearest", "its error"]]
    notes = []
    for number, row in enumerate(report["rows"], start=1):
        figures = [f"{row['paper']:g}"]
        for value, error in (("ours", "error"), ("nearest", "nearest_error")):
            figures += [_figure(row[value]), _error(row[error])]
        cells.append([f"{number:2} {row['source']}", row["what"], row["unit"], *figures])
        notes.append(f"{number:2} from: {row['inputs']}" + (f"\n   {row['why']}" if row["why"] else ""))
    counts = report["counts"]
    summary = (
        f"{counts['given']} of {counts['figures']} figures follow from published inputs, "
        f"{counts['within_10_percent']} of them within 10 %. For {counts['input_missing']} an input is missing: "
        "`nearest` is what the nearest published one gives. Nothing is fitted."
    )
    return "\n".join([*format_columns(cells, left=3), "", *notes, "", summary])


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
