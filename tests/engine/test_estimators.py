"""What the governor learns, against closed formulas."""

from __future__ import annotations

import random

import pytest

from engine.control.estimators import (
    PRIOR_ACCEPTANCE,
    AcceptanceEstimator,
    Correction,
    CostEstimator,
    Ema,
    LoadEstimator,
    RunningLine,
)
from engine.control.presets import PRESETS, emulated_gbps, find_preset
from engine.control.roofline import CycleCosts, cycle_seconds, rate
from engine.errors import UsageError


def test_ema():
    ema = Ema(0.25)
    assert ema.get(7.0) == 7.0
    ema.add(2.0)
    assert ema.get(7.0) == 2.0
    ema.add(4.0)
    assert ema.get(7.0) == 2.5


@pytest.mark.parametrize("accept", (0.0, 0.5, 0.9))
def test_expected_tokens_are_a_geometric_sum(accept: float):
    """Leviathan et al., equation 1: (1 - a^(k+1)) / (1 - a)."""
    estimator, draw = AcceptanceEstimator(8), random.Random(0)
    for _ in range(4000):
        accepted = 0
        while accepted < 8 and draw.random() < accept:
            accepted += 1
        estimator.observe(min(accepted + 1, 8), accepted)
    for k in range(9):
        closed = (1 - accept ** (k + 1)) / (1 - accept)
        assert estimator.expected_tokens(k) == pytest.approx(closed, rel=0.25)
    assert estimator.expected_tokens(0) == 1


def test_expected_tokens_before_and_at_certainty():
    estimator = AcceptanceEstimator(4)
    assert estimator.expected_tokens(4) == pytest.approx(sum(PRIOR_ACCEPTANCE**i for i in range(5)))
    for _ in range(300):
        estimator.observe(4, 4)
    assert estimator.expected_tokens(4) == pytest.approx(5, rel=0.01)


def test_one_unlucky_round_is_not_believed():
    """At k = 0 nothing more is learned, so a single rejection must not end all drafting."""
    estimator = AcceptanceEstimator(8)
    for _ in range(10):
        estimator.observe(8, 8)
    estimator.observe(1, 0)
    assert estimator.probability(0) > 0.8
    first = AcceptanceEstimator(8)
    first.observe(1, 0)
    assert 0.3 < first.probability(0) < PRIOR_ACCEPTANCE


def test_positions_are_told_apart():
    """The first token is always right, the second never."""
    estimator = AcceptanceEstimator(4)
    for _ in range(300):
        estimator.observe(2, 1)
    assert estimator.probability(0) > 0.85 and estimator.probability(1) < 0.15
    assert [estimator.expected_tokens(k) for k in (1, 2, 4)] == pytest.approx([1.9, 2, 2], rel=0.1)


def test_loads_are_known_up_to_the_chunk_and_extrapolated_beyond():
    """MoESD, equation 8: t rows of independent routing reach N(t) = E (1 - (1 - top_k / E)^t) experts."""
    experts, top_k = 64, 6

    def reached(rows: int) -> float:
        return experts * (1 - (1 - top_k / experts) ** rows)

    loads = LoadEstimator(17, experts, top_k)
    assert loads.misses(5) == 0
    for _ in range(3):
        loads.observe([reached(rows) for rows in range(1, 4)])
    for rows in range(1, 18):
        assert loads.misses(rows) == pytest.approx(reached(rows))


def test_loads_saturate_when_every_expert_is_taken():
    loads = LoadEstimator(8, experts=4, top_k=4)
    loads.observe([4])
    assert [loads.misses(rows) for rows in (1, 2, 8)] == [4, 4, 4]


def test_one_observation_assumes_half_of_the_cost_fixed():
    line = RunningLine()
    assert line(5) == 0
    line.add(2, 8.0)
    assert (line(2), line(4)) == (8.0, 12.0)


def test_a_line_through_noise_is_found_and_never_falls():
    line, falling, draw = RunningLine(), RunningLine(), random.Random(1)
    for _ in range(300):
        x = draw.randint(1, 9)
        line.add(x, (3 + 0.5 * x) * draw.uniform(0.95, 1.05))
        falling.add(x, 10.0 - x)
    for x in (1, 5, 9, 12):
        assert line(x) == pytest.approx(3 + 0.5 * x, rel=0.05)
    assert falling(2) == pytest.approx(falling(9))


def test_costs_start_unknown():
    costs = CostEstimator()
    assert (costs.draft_pass.get(1.5), costs.overhead.get(2.5), costs.verify(3)) == (1.5, 2.5, 0.0)


def test_corrections_reach_their_neighbours_and_have_limits():
    correction = Correction()
    assert correction(3) == 1
    for _ in range(50):
        correction.add(1, 1.0)
        correction.add(7, 2.0)
    values = [correction(k) for k in range(1, 8)]
    assert values == sorted(values) and 1 <= values[0] < 1.2 and 1.8 < values[-1] <= 2
    assert correction(0) == 1, "plain decoding is another matter"
    wild = Correction()
    wild.add(2, 1e9)
    assert wild(2) == pytest.approx(4)
    wild = Correction()
    wild.add(2, 1e-9)
    assert wild(2) == pytest.approx(0.25)


def test_a_cycle_hides_what_fits_under_compute():
    costs = {"draft": 4.0, "verify": 5.0, "overhead": 1.0}
    for transfer, hidden, exposed in ((0, 10, 10), (3, 10, 13), (4, 10, 14), (9, 10, 19), (12, 13, 22)):
        assert cycle_seconds(CycleCosts(transfer=transfer, prefetching=True, **costs)) == hidden
        assert cycle_seconds(CycleCosts(transfer=transfer, prefetching=False, **costs)) == exposed
    assert rate(6, 3.0) == 2.0
    assert rate(6, 0.0) == 0.0


def test_presets_pace_the_link_like_the_published_machine():
    phi = find_preset("phi3.5-a100")
    # An expert of 3 x 4096 x 6400 parameters in 2 bytes at 16 GB/s: 9.83 ms. A layer reads two of them and
    # 41.9 M of attention at 1,555 GB/s: 0.256 ms.
    assert phi.ratio == pytest.approx(9.83 / 0.2562, rel=0.002)
    for preset in PRESETS.values():
        gbps = emulated_gbps(preset, expert_bytes=1_000_000, layer_seconds=1e-3)
        assert 1_000_000 / (gbps * 1e9) == pytest.approx(preset.ratio * 1e-3)
        assert preset.source and preset.label
    with pytest.raises(UsageError, match="phi3.5-a100"):
        find_preset("h100")
