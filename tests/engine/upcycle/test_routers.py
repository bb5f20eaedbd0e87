"""Routers that come from hidden states: they find clusters, and a common direction does not blind them."""

from __future__ import annotations

import pytest
import torch

from engine.upcycle.routers import router, shares

HIDDEN, EXPERTS, ROWS = 64, 6, 1200


@pytest.fixture
def clusters() -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, the cluster that each was drawn from): six directions, and one far larger that all rows share."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(ROWS) % EXPERTS
    directions = torch.nn.functional.normalize(torch.randn(EXPERTS, HIDDEN, generator=generator), dim=1)
    common = 20 * torch.nn.functional.normalize(torch.randn(HIDDEN, generator=generator), dim=0)
    return common + directions[labels] + 0.03 * torch.randn(ROWS, HIDDEN, generator=generator), labels


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_clusters(seed: int, clusters):
    rows, labels = clusters
    weight = router(rows, EXPERTS, torch.Generator().manual_seed(seed))
    assert weight.shape == (EXPERTS, HIDDEN)
    choice = (rows @ weight.T).argmax(dim=1)
    pairs = set(zip(labels.tolist(), choice.tolist(), strict=True))
    assert len(pairs) == EXPERTS == len({expert for _, expert in pairs})
    assert shares(rows, weight, 1).tolist() == pytest.approx([1 / EXPERTS] * EXPERTS)


def test_the_scale_of_the_logits_is_one_whatever_the_scale_of_the_states(clusters):
    rows, _ = clusters
    for factor in (0.01, 1.0, 100.0):
        weight = router(factor * rows, EXPERTS, torch.Generator().manual_seed(0))
        assert float((factor * rows @ weight.T).std()) == pytest.approx(1, rel=0.02)


def test_the_common_direction_is_not_seen(clusters):
    rows, _ = clusters
    weight = router(rows, EXPERTS, torch.Generator().manual_seed(0))
    mean = rows.mean(dim=0)
    assert float((weight @ mean).abs().max()) < 1e-3 * float(weight.norm(dim=1).max() * mean.norm())


def test_states_without_clusters_are_spread_too():
    rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)) + 5
    share = shares(rows, router(rows, 8, torch.Generator().manual_seed(0)), 2)
    assert float(share.sum()) == pytest.approx(1)
    assert float(share.min()) > 0.5 / 8 and float(share.max()) < 2 / 8


def test_fewer_directions_than_experts_leave_no_nan():
    rows = torch.eye(3, HIDDEN).repeat(100, 1)
    assert router(rows, 8, torch.Generator().manual_seed(0)).isfinite().all()
