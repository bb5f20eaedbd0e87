"""expert_ffn and combine: against float64, row by row bit for bit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    ACTIVATIONS,
    DTYPES,
    FLOAT,
    Bounded,
    Experts,
    choice,
    expert_sizes,
    few_examples,
    grouped,
    random,
    row_counts,
    same_bits,
    seeds,
    sizes,
    some_rows,
)

from engine.kernels.native import Native

activations = st.sampled_from(sorted(ACTIVATIONS))
#: How many experts there are, how many a row takes, and whether all rows take the same one.
mixes = st.sampled_from([(1, 1, None), (4, 2, None), (4, 1, 2), (9, 3, None)])
Mix = tuple[int, int, "int | None"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, rows=row_counts, shape=expert_sizes, mix=mixes, activation=activations)
@few_examples
def test_experts_are_within_the_bound(
    variant: str,
    dtype: torch.dtype,
    seed: int,
    rows: int,
    shape: tuple[int, int],
    mix: Mix,
    activation: str,
) -> None:
    (hidden, intermediate), (count, top_k, only) = shape, mix
    experts = Experts.random(seed, count, hidden, intermediate, dtype)
    x, index = random(seed, rows, hidden, dtype=dtype), choice(seed, rows, top_k, count, only=only)
    found = experts.run(x, index, activation)
    for expert in index.unique().tolist():
        row, place = (index == expert).nonzero(as_tuple=True)
        experts.expected(expert, x[row], activation).check(found[row, place])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, rows=row_counts, shape=expert_sizes, mix=mixes, threads=st.integers(1, 3))
@few_examples
def test_a_row_does_not_depend_on_its_company(
    variant: str,
    library: Native,
    dtype: torch.dtype,
    seed: int,
    rows: int,
    shape: tuple[int, int],
    mix: Mix,
    threads: int,
) -> None:
    (hidden, intermediate), (count, top_k, only) = shape, mix
    experts = Experts.random(seed, count, hidden, intermediate, dtype)
    x, index = random(seed, rows, hidden, dtype=dtype), choice(seed, rows, top_k, count, only=only)
    library.set_threads(threads)
    together = experts.run(x, index)
    library.set_threads(threads % 3 + 1)
    for row in some_rows(rows):
        assert same_bits(together[row : row + 1], experts.run(x[row : row + 1], index[row : row + 1])), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_row_stays_alone(variant: str, dtype: torch.dtype) -> None:
    experts, index = Experts.random(0, 3, 100, 33, dtype), choice(0, 20, 2, 3)
    x = random(1, 20, 100, dtype=dtype)
    good = experts.run(x, index)
    x[4, 7], x[11, 99] = float("nan"), float("inf")
    found = experts.run(x, index)
    others = [row for row in range(20) if row not in (4, 11)]
    assert same_bits(found[others], good[others])
    assert found[4].isnan().all() and not found[11].isfinite().any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_over_their_whole_range(variant: str, dtype: torch.dtype, activation: str) -> None:
    """One input, one intermediate feature and weights of 1: gate and up are both x."""
    experts = Experts([torch.ones(2, 1, dtype=dtype)], [torch.ones(1, 1, dtype=dtype)])
    x = torch.cat([torch.linspace(-120, 120, 481), torch.tensor([0.0, -0.0, 1e4, -1e4, 1e-30, -1e-30])])
    x = x[:, None].to(dtype)
    found = experts.run(x, torch.zeros(len(x), 1, dtype=torch.int64), activation)
    experts.expected(0, x, activation).check(found[:, 0])


def test_what_lies_between_the_projections_is_bfloat16(variant: str) -> None:
    hidden = 40
    experts = Experts.random(0, 1, hidden, hidden, torch.bfloat16)
    experts.down[0].copy_(torch.eye(hidden))
    found = experts.run(random(1, 9, hidden, dtype=torch.bfloat16), torch.zeros(9, 1, dtype=torch.int64))
    assert torch.equal(found, found.bfloat16().float())


def test_only_the_named_slots_are_written(variant: str) -> None:
    experts, x = Experts.random(0, 2, 40, 24, torch.float32), random(1, 3, 40)
    offsets, rows, slots = grouped(torch.tensor([[1], [0], [1]]), 2)
    out = torch.full((8, 40), 7.0)
    torch.ops.specviz.expert_ffn(x, experts.gate_up, experts.down, offsets, rows, slots + 4, out, "silu")
    assert (out[:4] == 7).all() and (out[7:] == 7).all() and (out[4:7] != 7).all()


def test_no_rows_at_all(variant: str) -> None:
    experts = Experts.random(0, 2, 40, 24, torch.float32)
    assert experts.run(random(1, 0, 40), torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, rows=row_counts, top_k=st.sampled_from([1, 2, 8]), hidden=sizes)
@few_examples
def test_combine(variant: str, dtype: torch.dtype, seed: int, rows: int, top_k: int, hidden: int) -> None:
    outputs, weights = random(seed, rows, top_k, hidden), random(seed + 1, rows, top_k)
    found = torch.ops.specviz.combine(outputs, weights, torch.empty(0, dtype=dtype))
    terms = outputs.double() * weights.double()[..., None]
    expected = Bounded(terms.sum(1), (top_k + 1) * FLOAT * terms.abs().sum(1))
    (expected.rounded(dtype) if dtype == torch.bfloat16 else expected).check(found)
    for row in some_rows(rows):
        alone = torch.ops.specviz.combine(outputs[row : row + 1], weights[row : row + 1], torch.empty(0, dtype=dtype))
        assert same_bits(found[row : row + 1], alone)


def ffn_arguments() -> dict[str, Any]:
    """Two experts of 8 features, 3 rows, 4 pairs."""
    return {
        "x": torch.zeros(3, 8),
        "gate_up": [torch.zeros(12, 8)] * 2,
        "down": [torch.zeros(8, 6)] * 2,
        "offsets": torch.tensor([0, 1, 4]),
        "rows": torch.tensor([0, 0, 1, 2]),
        "slots": torch.tensor([0, 1, 2, 3]),
        "out": torch.zeros(4, 8),
        "activation": "silu",
    }


REFUSED_BY_FFN = {
    "one-dimensional x": ({"x": torch.zeros(8)}, "x has shape"),
    "strided x": ({"x": torch.zeros(8, 3).t()}, "x must be contiguous"),
    "float64": ({"x": torch.zeros(3, 8).double()}, "x must be float32 or bfloat16"),
    "lists of different lengths": ({"down": [torch.zeros(8, 6)]}, "gate_up and down must be lists of as many"),
    "no experts": ({"gate_up": [], "down": []}, "gate_up and down must be lists .* at least one"),
    "gate_up of another width": ({"gate_up": [torch.zeros(12, 8), torch.zeros(11, 8)]}, "gate_up has shape"),
    "down of another width": ({"down": [torch.zeros(8, 6), torch.zeros(8, 5)]}, "down has shape"),
    "down, one-dimensional": ({"down": [torch.zeros(8)] * 2}, "down must hold matrices"),
    "strided gate_up": ({"gate_up": [torch.zeros(8, 12).t()] * 2}, "gate_up must be contiguous"),
    "strided down": ({"down": [torch.zeros(8, 12)[:, ::2]] * 2}, "down must be contiguous"),
    "experts of another dtype": ({"down": [torch.zeros(8, 6).bfloat16()] * 2}, "experts and x must have one dtype"),
    "out of another dtype": ({"out": torch.zeros(4, 8).bfloat16()}, "out must be float32"),
    "out of another width": ({"out": torch.zeros(4, 9)}, "out has shape"),
    "strided out": ({"out": torch.zeros(8, 4).t()}, "out must be contiguous"),
    "a row too many": ({"rows": torch.tensor([0, 0, 1, 3])}, r"rows\[3\] = 3 is not below 3"),
    "a negative row": ({"rows": torch.tensor([0, -1, 1, 2])}, r"rows\[1\] = -1"),
    "a slot too many": ({"slots": torch.tensor([0, 4, 2, 3])}, r"slots\[1\] = 4"),
    "fewer slots": ({"slots": torch.tensor([0, 1, 2])}, "slots has shape"),
    "int32 rows": ({"rows": torch.zeros(4, dtype=torch.int32)}, "rows must be int64"),
    "falling offsets": (
        {"offsets": torch.tensor([0, 3, 1, 4]), "gate_up": [torch.zeros(12, 8)] * 3, "down": [torch.zeros(8, 6)] * 3},
        "offsets must not fall",
    ),
    "offsets that end early": ({"offsets": torch.tensor([0, 1, 3])}, "offsets must go from 0"),
    "offsets that start late": ({"offsets": torch.tensor([1, 1, 4])}, "offsets must go from 0"),
    "offsets beyond the end": ({"offsets": torch.tensor([0, 9, 4])}, r"offsets\[1\] = 9"),
    "negative offsets": ({"offsets": torch.tensor([0, -2, 4])}, r"offsets\[1\] = -2"),
    "fewer offsets": ({"offsets": torch.tensor([0, 4])}, "offsets has shape"),
    "unknown activation": ({"activation": "relu"}, "unknown activation relu"),
}


@pytest.mark.parametrize("changes, message", REFUSED_BY_FFN.values(), ids=REFUSED_BY_FFN.keys())
def test_ffn_refuses(library: Native, changes: dict[str, Any], message: str) -> None:
    torch.ops.specviz.expert_ffn(**ffn_arguments())
    with pytest.raises(RuntimeError, match=f"specviz::expert_ffn: .*{message}"):
        torch.ops.specviz.expert_ffn(**{**ffn_arguments(), **changes})


OUTPUTS, LIKE = torch.zeros(3, 2, 8), torch.zeros(1)
REFUSED_BY_COMBINE = {
    "weights for other rows": (OUTPUTS, torch.zeros(4, 2), LIKE, "outputs has shape"),
    "weights for another top-k": (OUTPUTS, torch.zeros(3, 3), LIKE, "outputs has shape"),
    "one-dimensional weights": (OUTPUTS, torch.zeros(6), LIKE, "weights has shape"),
    "bfloat16 weights": (OUTPUTS, torch.zeros(3, 2).bfloat16(), LIKE, "weights must be float32"),
    "bfloat16 outputs": (OUTPUTS.bfloat16(), torch.zeros(3, 2), LIKE, "outputs must be float32"),
    "strided outputs": (torch.zeros(3, 8, 2).mT, torch.zeros(3, 2), LIKE, "outputs must be contiguous"),
    "float64 results": (OUTPUTS, torch.zeros(3, 2), LIKE.double(), "like must be float32 or bfloat16"),
}


@pytest.mark.parametrize("outputs, weights, like, message", REFUSED_BY_COMBINE.values(), ids=REFUSED_BY_COMBINE.keys())
def test_combine_refuses(
    library: Native, outputs: torch.Tensor, weights: torch.Tensor, like: torch.Tensor, message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"specviz::combine: .*{message}"):
        torch.ops.specviz.combine(outputs, weights, like)
