"""Sets of time as sorted, disjoint half-open intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Any intervals as a sorted list of disjoint ones."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(base: list[Interval], holes: list[Interval]) -> list[Interval]:
    """`base` without `holes`, both as `merge` returns them."""
    left: list[Interval] = []
    for start, end in base:
        for hole_start, hole_end in clip(holes, (start, end)):
            if hole_start > start:
                left.append((start, hole_start))
            start = hole_end
        if end > start:
            left.append((start, end))
    return left


def clip(intervals: list[Interval], window: Interval) -> list[Interval]:
    """The parts of `intervals` (as `merge` returns them) inside `window`."""
    low, high = window
    first = bisect_right(intervals, low, key=lambda i: i[1])
    last = bisect_left(intervals, high, key=lambda i: i[0])
    return [(max(start, low), min(end, high)) for start, end in intervals[first:last]]


def covered(intervals: list[Interval]) -> int:
    """Total length."""
    return sum(end - start for start, end in intervals)
