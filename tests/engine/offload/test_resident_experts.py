"""Drafting with resident experts: computes what it should, and leaves the cache as if it had never been there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations import moe

from engine.errors import Cancelled
from engine.offload.cache import ExpertCache
from engine.offload.disk import DiskLink
from engine.offload.groups import RowGroups
from engine.offload.likeness import Likeness
from engine.offload.resident import ResidentExperts, share_of_the_rest
from engine.offload.source import ExpertSource
from engine.offload.stream import Lease

TOP_K = 3


class Module(torch.nn.Module):
    """What the experts seam shows of a gated FFN."""

    is_transposed = has_bias = has_post_expert_norm = False
    is_concatenated = has_gate = True
    _apply_gate = moe._default_apply_gate

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = torch.nn.SiLU()


class Observer:
    """Notes the layers, and does something in the middle of one."""

    def __init__(self) -> None:
        self.seen: list = []
        self.at_routed = lambda: None

    def routed(self, layer: int, index: list, weights: list, hidden: torch.Tensor) -> None:
        self.seen.append((layer, index, weights))
        self.at_routed()

    def computed(self, layer: int, rows: int) -> None:
        self.seen.append((layer, rows))


@contextmanager
def opened(source: ExpertSource | AlikeSource, witness=None) -> Iterator[ExpertCache]:
    """A cache over `source` in which experts 1 and 2 of layer 0 are resident."""
    cache = ExpertCache(source.table, 2, torch.float32, DiskLink(source), "lru", witness)
    for lease in cache.stream(0, [1, 2]):
        assert lease.expert in (1, 2)
    yield cache
    cache.close()
    cache.link.close()
    source.close()


@pytest.fixture
def cache(make_checkpoint, witness) -> Iterator[ExpertCache]:
    with opened(ExpertSource(make_checkpoint(torch.float32).table, direct=False), witness) as cache:
        yield cache


def weights_of(cache: ExpertCache, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down as they lie on disk."""
    raw = torch.empty(cache.table.shape.nbytes, dtype=torch.uint8)
    cache.link.source.read(layer, expert, 0, raw)
    return cache.table.shape.views(raw.view(torch.float32))


def route(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and for each row TOP_K of 4 experts with falling weights."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 24, generator=generator)
    scores = torch.randn(rows, 4, generator=generator).softmax(-1)
    top = scores.topk(TOP_K, dim=-1)
    return hidden, top.indices, top.values


def dense(cache: ExpertCache, hidden, index, weights, here: set[int], most: int) -> torch.Tensor:
    """The definition, row by row in float64, from the bytes on disk."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for row, x in enumerate(hidden.double()):
        choice = sorted(zip(weights[row].tolist(), index[row].tolist(), strict=True), reverse=True)
        for weight, expert in [pair for pair in choice if pair[1] in here][:most]:
            gate_up, down = (matrix.double() for matrix in weights_of(cache, 0, expert))
            gate, up = (gate_up @ x).chunk(2)
            out[row] += weight * (down @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("native", (False, True), ids=("torch", "kernels"))
@pytest.mark.parametrize("most", (1, 2, 8))
@pytest.mark.parametrize("rows", (1, 2, 7))
def test_computes_the_likeliest_that_are_resident(rows: int, most: int, native: bool, cache):
    hidden, index, weights = route(rows)
    observer = Observer()
    experts = ResidentExperts(cache, observer, most, native and kernels())
    out = experts.run(0, Module(), hidden, index, weights)
    reference = dense(cache, hidden, index, weights, {1, 2}, most)
    torch.testing.assert_close(out.double(), reference, atol=1e-5, rtol=1e-4)
    assert observer.seen == [(0, index.tolist(), weights.tolist()), (0, rows)]


def kernels() -> bool:
    from engine.kernels.native import Native, native

    return isinstance(native(), Native)


def test_a_token_without_resident_experts_is_left_alone(cache):
    hidden, index, weights = torch.randn(2, 24), torch.tensor([[0, 3], [0, 1]]), torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    out = ResidentExperts(cache, Observer(), 2, native=False).run(0, Module(), hidden, index, weights)
    assert torch.equal(out[0], torch.zeros(24))
    assert out[1].abs().max() > 0
    nothing = ResidentExperts(cache, Observer(), 2, native=kernels()).run(1, Module(), hidden, index, weights)
    assert torch.equal(nothing, torch.zeros(2, 24))


def test_asks_nothing_of_the_cache(cache, witness):
    stats, resident, transfers = cache.stats, cache.resident(), len(witness.transfers)
    cache.take_round()
    hidden, index, weights = route(7)
    ResidentExperts(cache, Observer(), 2, native=False).run(0, Module(), hidden, index, weights)
    assert (cache.stats, cache.resident(), len(witness.transfers)) == (stats, resident, transfers)
    seen = cache.take_round()
    assert (seen.hits, seen.late, seen.misses, seen.used) == (0, 0, 0, [[], []])


def test_lent_experts_stay_and_are_free_afterwards(cache):
    """Neither a prefetch nor a smaller budget takes them away under the draft; both may as soon as it is done."""
    with cache.lend(0, [0, 1, 2]) as leases:
        assert set(leases) == {1, 2}
        assert not cache.prefetch(0, 3, 0)
        cache.resize(1)
        assert cache.resident()[0] == [1, 2]
        gate_up, down = weights_of(cache, 0, 1)
        assert torch.equal(leases[1].gate_up, gate_up) and torch.equal(leases[1].down, down)
    assert len(cache.resident()[0]) == 1
    assert cache.prefetch(0, 3, 0)


def test_an_error_inside_gives_them_back(cache):
    with pytest.raises(ZeroDivisionError), cache.lend(0, [1, 2]):
        raise ZeroDivisionError
    assert cache.prefetch(0, 3, 0)


def test_what_is_still_on_its_way_is_not_lent(cache):
    assert cache.prefetch(0, 3, 0)
    with cache.lend(0, [3]) as leases:
        # The link may have been quick; what was lent is there in full.
        for expert, lease in leases.items():
            assert torch.equal(lease.gate_up, weights_of(cache, 0, expert)[0])


def test_an_eviction_by_the_prefetch_of_this_very_layer_is_seen(cache):
    """`routed` may start transfers that evict: the draft then goes without, and reads nobody's half of an expert."""
    observer = Observer()
    observer.at_routed = lambda: cache.prefetch(0, 3, 0) and cache.resize(1)
    index, weights = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])
    hidden = torch.randn(1, 24)
    out = ResidentExperts(cache, observer, 2, native=False).run(0, Module(), hidden, index, weights)
    left = set(cache.resident()[0]) & {1, 2}
    torch.testing.assert_close(out.double(), dense(cache, hidden, index, weights, left, 2), atol=1e-5, rtol=1e-4)


def test_stops(cache):
    experts = ResidentExperts(cache, Observer(), 2, native=False)
    experts.stop = threading.Event()
    experts.stop.set()
    with pytest.raises(Cancelled):
        experts.run(0, Module(), *route(1))


class AlikeSource:
    """The experts of `source`, each mixed with the layer's first one so that any two weights correlate by `cosine`."""

    def __init__(self, source: ExpertSource, cosine: float) -> None:
        self._source, self._cosine = source, cosine
        self.table, self.dtype, self.expert_nbytes = source.table, source.dtype, source.expert_nbytes

    def __getattr__(self, name: str):
        return getattr(self._source, name)

    def read(self, layer: int, expert: int, offset: int, out: torch.Tensor) -> None:
        whole = [torch.empty(self.expert_nbytes, dtype=torch.uint8) for _ in range(2)]
        self._source.read(layer, 0, 0, whole[0])
        self._source.read(layer, expert, 0, whole[1])
        common, own = (part.view(torch.float32) for part in whole)
        mixed = self._cosine**0.5 * common + (1 - self._cosine) ** 0.5 * own if expert else own
        out.copy_(mixed.view(torch.uint8)[offset : offset + out.numel()])


@pytest.fixture
def alike(make_checkpoint) -> Iterator[ExpertCache]:
    """Experts 1 and 2 of four that are nearly the same."""
    source = AlikeSource(ExpertSource(make_checkpoint(torch.float32).table, direct=False), 0.998)
    with opened(source) as cache:
        yield cache


@pytest.mark.parametrize("most", (1, 2))
def test_what_is_here_stands_in_for_what_is_like_it(most: int, alike):
    """No token has an expert here; the whole layer's output still comes out nearly right."""
    hidden = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    index, weights = torch.tensor([[0, 3]] * 5), torch.tensor([[0.7, 0.3]] * 5)
    out = ResidentExperts(alike, Observer(), most, native=False).run(0, Module(), hidden, index, weights).double()
    whole = dense(alike, hidden, torch.tensor([[2, 3]] * 5), weights, {2, 3}, 2)
    assert F.cosine_similarity(out, whole).min() > 0.97
    assert (out.norm(dim=1) / whole.norm(dim=1)).sub(1).abs().max() < 0.15


def test_one_of_two_experts_speaks_for_both(alike):
    hidden = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    index, weights = torch.tensor([[1, 2]] * 5), torch.tensor([[0.6, 0.4]] * 5)
    one, both = (
        ResidentExperts(alike, Observer(), most, native=False).run(0, Module(), hidden, index, weights)
        for most in (1, 2)
    )
    assert F.cosine_similarity(one, both).min() > 0.97
    assert (one.norm(dim=1) / both.norm(dim=1)).sub(1).abs().max() < 0.1


def test_a_batch_shares_what_its_tokens_want_most(alike, monkeypatch):
    """Where experts are nearly the same, all rows take the same ones, and come out as they would one by one."""
    hidden = torch.randn(5, 24, generator=torch.Generator().manual_seed(4))
    index = torch.tensor([[1, 0], [2, 0], [2, 1], [2, 3], [0, 3]])
    weights = torch.tensor([[0.7, 0.3]] * 5)
    computed = []
    groups = RowGroups.compute
    monkeypatch.setattr(RowGroups, "compute", lambda self, module, leases: (
        computed.append({lease.expert for lease in leases}), groups(self, module, leases))[1])  # fmt: skip
    experts = ResidentExperts(alike, Observer(), 1, native=False)
    together = experts.run(0, Module(), hidden, index, weights)
    assert computed == [{2}], "wanted by 2.1 in all, where expert 1 is wanted by 1.0"
    alone = torch.cat([
        experts.run(0, Module(), hidden[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(5)
    ])  # fmt: skip
    # The last row has no expert here: which one stands in for both is anybody's choice.
    assert F.cosine_similarity(together, alone)[:4].min() > 0.97
    assert {1} in computed[1:], "alone, a token's own expert comes first"


def lease(expert: int, matrix: torch.Tensor) -> Lease:
    return Lease(expert, matrix, matrix.T)


@pytest.mark.parametrize(("cosine", "expected"), ((1.0, 1.0), (0.9, 0.9**3), (0.3, 0.0), (0.0, 0.0), (-1.0, 0.0)))
def test_likeness_is_the_correlation_of_outputs(cosine: float, expected: float):
    generator = torch.Generator().manual_seed(3)
    one, noise = (torch.randn(200, 300, generator=generator) for _ in range(2))
    other = cosine * one + (1 - cosine**2) ** 0.5 * noise
    likeness = Likeness()
    likeness.compare(0, {4: lease(4, one)})
    assert not likeness.known(0) and likeness.of(0) == 0
    likeness.compare(0, {4: lease(4, one), 5: lease(5, other)})
    assert likeness.known(0) and likeness.of(0) == pytest.approx(expected, abs=0.03)
    assert not likeness.known(1)


@pytest.mark.parametrize("alike", (0.0, 0.2, 0.7, 1.0))
@pytest.mark.parametrize("computed", (1, 2, 5))
def test_the_share_is_the_least_squares_one(alike: float, computed: int):
    """Against the normal equations of outputs that correlate by `alike`."""
    if alike == 1.0:
        expected = torch.full((computed,), 1 / computed)
    else:
        covariance = torch.eye(computed) * (1 - alike) + alike
        expected = torch.linalg.solve(covariance, torch.full((computed,), alike))
    torch.testing.assert_close(torch.full((computed,), share_of_the_rest(alike, computed)), expected)


def test_nothing_computed_takes_no_share():
    assert share_of_the_rest(0.9, 0) == 0
