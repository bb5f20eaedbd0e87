"""A run's summary as CSV: one figure a row, under the name that it has in the summary's JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

#: Lists longer than this are curves and tables for programs; the JSON has them.
LONGEST_LIST = 32
#: A spreadsheet takes a text that begins with one of these for a formula, and a model may write anything.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def summary_csv(summary: dict[str, Any]) -> str:
    """Columns `name` (dotted, list places from 0) and `value`; what is not known is empty."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(("name", "value"))
    writer.writerows((name, _cell(value)) for name, value in _leaves(summary, ""))
    return out.getvalue()


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value) if len(value) <= LONGEST_LIST else ()
    else:
        yield name, value
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        # A spreadsheet reads UTF-8, and half of an emoji (a lone surrogate) is not that.
        text = value.encode("utf-8", "replace").decode()
        return f"'{text}" if text.startswith(FORMULA_STARTS) else text
    return value
