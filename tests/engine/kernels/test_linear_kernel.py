"""linear: against float64, row by row bit for bit, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DTYPES, Bounded, few_examples, random, row_counts, same_bits, seeds, sizes, some_rows

from engine.kernels.native import Native


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.specviz.linear(x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, rows=row_counts, depth=sizes, width=sizes, biased=st.booleans())
@few_examples
def test_it_is_within_the_bound(
    variant: str, dtype: torch.dtype, seed: int, rows: int, depth: int, width: int, biased: bool
) -> None:
    x, weight = random(seed, rows, depth, dtype=dtype), random(seed + 1, width, depth, dtype=dtype)
    bias = random(seed + 2, width, dtype=dtype) if biased else None
    expected = Bounded.exactly(x).times_matrix(weight)
    if bias is not None:
        expected = expected.plus(bias)
    if dtype == torch.bfloat16:
        expected = expected.rounded(dtype)
    expected.check(linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, rows=row_counts, depth=sizes, width=sizes, threads=st.integers(1, 3))
@few_examples
def test_a_row_does_not_depend_on_its_company(
    variant: str, library: Native, dtype: torch.dtype, seed: int, rows: int, depth: int, width: int, threads: int
) -> None:
    x, weight = random(seed, rows, depth, dtype=dtype), random(seed + 1, width, depth, dtype=dtype)
    bias = random(seed + 2, width, dtype=dtype)
    library.set_threads(threads)
    together = linear(x, weight, bias)
    library.set_threads(threads % 3 + 1)
    for row in some_rows(rows):
        assert same_bits(together[row : row + 1], linear(x[row : row + 1], weight, bias)), f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 6, 17, 70])
def test_a_bad_row_stays_alone(variant: str, dtype: torch.dtype, rows: int) -> None:
    x, weight = random(0, rows, 100, dtype=dtype), random(1, 33, 100, dtype=dtype)
    good = linear(x, weight)
    for row, bad in ((0, float("nan")), (rows // 2, float("inf")), (rows - 1, float("-inf"))):
        spoiled = x.clone()
        spoiled[row, 99] = bad
        found = linear(spoiled, weight)
        others = [r for r in range(rows) if r != row]
        assert not torch.isfinite(found[row]).any()
        assert same_bits(found[others], good[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_behind_a_row_of_weights_does_not_matter(variant: str, dtype: torch.dtype) -> None:
    """The end of a row is read with care: the next row's NaN does not come in, not even times zero."""
    x, weight = random(0, 5, 33, dtype=dtype), random(1, 20, 33, dtype=dtype)
    weight[1::2] = float("nan")
    found = linear(x, weight)
    assert torch.isfinite(found[:, ::2]).all() and found[:, 1::2].isnan().all()
    assert same_bits(found[:, ::2].contiguous(), linear(x, weight[::2].contiguous()))


def test_any_shape_and_strides_of_x(variant: str) -> None:
    x, weight = random(0, 4, 3, 40).transpose(0, 1), random(1, 9, 40)
    found = linear(x, weight)
    assert found.shape == (3, 4, 9)
    assert same_bits(found.view(12, 9), linear(x.reshape(12, 40), weight))
    assert linear(x[0, 0], weight).shape == (9,)
    assert linear(x[:0], weight).shape == (0, 4, 9)
    assert linear(x, weight[:0]).shape == (3, 4, 0)


X, WEIGHT = torch.zeros(2, 8), torch.zeros(4, 8)
REFUSED = {
    "depth": (X, torch.zeros(4, 7), None, r"weight has shape \(4, 7\), expected \(\*, 8\)"),
    "one-dimensional weight": (X, torch.zeros(8), None, "weight has shape"),
    "no features": (torch.zeros(2, 0), torch.zeros(4, 0), None, "x has no features"),
    "no dimension": (torch.tensor(1.0), WEIGHT, None, "x needs a dimension"),
    "float64": (X.double(), WEIGHT.double(), None, "x must be float32 or bfloat16"),
    "float16": (X.half(), WEIGHT.half(), None, "x must be float32 or bfloat16"),
    "two dtypes": (X, WEIGHT.bfloat16(), None, "weight and x must have one dtype"),
    "strided weight": (X, torch.zeros(8, 4).t(), None, "weight must be contiguous"),
    "bias of another size": (X, WEIGHT, torch.zeros(5), r"bias has shape \(5\), expected \(4\)"),
    "bias of another dtype": (X, WEIGHT, torch.zeros(4).bfloat16(), "bias and x must have one dtype"),
    "strided bias": (X, WEIGHT, torch.zeros(8)[::2], "bias must be contiguous"),
}


@pytest.mark.parametrize("x, weight, bias, message", REFUSED.values(), ids=REFUSED.keys())
def test_refuses(
    library: Native, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"specviz::linear: .*{message}"):
        linear(x, weight, bias)


@pytest.mark.parametrize("variant", ["amx"], indirect=True)
def test_tiles_are_released(library: Native, variant: str) -> None:
    """No thread keeps tiles between calls: every context switch would save them."""
    if not hasattr(library.library, "specviz_threads_with_tiles"):
        pytest.skip("only the emulation of tiles counts them (test_instrumented.py)")
    library.set_threads(3)
    found = linear(random(0, 20, 3000, dtype=torch.bfloat16), random(1, 300, 3000, dtype=torch.bfloat16))
    assert torch.isfinite(found).all()
    assert library.library.specviz_threads_with_tiles() == 0
