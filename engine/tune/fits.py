"""Curves through a few measured points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.control.routing import UniformRouting
from engine.errors import UsageError


@dataclass(frozen=True)
class Linear:
    """y = Σ weights·x, the first x being 1; no weight is negative (an operator that does more takes no less)."""

    weights: tuple[float, ...]

    def __call__(self, *x: float) -> float:
        return sum(weight * value for weight, value in zip(self.weights, (1.0, *x), strict=True))


def fit_linear(points: Sequence[Sequence[float]], values: Sequence[float]) -> Linear:
    """Least squares of relative errors, without negative weights.

    Every subset of the weights is tried as the one that is not zero: with two or three of them that is exact. Raises
    UsageError without points.
    """
    if not points:
        raise UsageError("a fit needs at least one point")
    design = np.array([(1.0, *point) for point in points])
    target = np.array(values, dtype=float)
    scale = 1 / np.maximum(np.abs(target), 1e-9)
    count = design.shape[1]
    best, least = (0.0,) * count, math.inf
    for chosen in range(1, 2**count):
        columns = [i for i in range(count) if chosen >> i & 1]
        if len(columns) > len({tuple(row) for row in design[:, columns]}):
            continue
        solved, *_ = np.linalg.lstsq(design[:, columns] * scale[:, None], target * scale, rcond=None)
        error = float(np.sum(((design[:, columns] @ solved - target) * scale) ** 2))
        if (solved >= 0).all() and error < least - 1e-12:
            best, least = tuple(float(solved[columns.index(i)]) if i in columns else 0.0 for i in range(count)), error
    return Linear(best)


@dataclass(frozen=True)
class PowerCurve:
    """Through points (x > 0, y ≥ 0), as powers of x between neighbours and beyond; one point is the same everywhere."""

    points: tuple[tuple[float, float], ...]

    TINY = 1e-9

    def __call__(self, x: float) -> float:
        xs = [math.log(at) for at, _ in self.points]
        ys = [math.log(max(value, self.TINY)) for _, value in self.points]
        if len(xs) == 1:
            return self.points[0][1]
        at = math.log(x)
        right = min(max(sum(other < at for other in xs), 1), len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        return math.exp(ys[right - 1] + slope * (at - xs[right - 1]))


@dataclass(frozen=True)
class Surface:
    """Experts by batch and rows a sequence (k + 1): a power curve over the rows at the nearest batch that was measured.

    Another batch is scaled as independent `routing` would.
    """

    routing: UniformRouting
    points: tuple[tuple[int, int, float], ...]

    def __call__(self, batch: int, rows: int) -> float:
        nearest = min((b for b, _, _ in self.points), key=lambda b: abs(math.log(b / batch)))
        curve = PowerCurve(tuple(sorted((float(r), y) for b, r, y in self.points if b == nearest)))
        scale = self.routing.distinct(batch * rows) / self.routing.distinct(nearest * rows)
        return curve(rows) * scale
