"""rms_norm: against float64, row by row bit for bit, what is refused, and which modules it stands in for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from kernel_cases import DTYPES, FLOAT, Bounded, few_examples, random, row_counts, same_bits, seeds, sizes, some_rows
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from engine.kernels.native import Native
from engine.kernels.norm import rms_norm_reference, use_norm_kernels

EPS = 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.specviz.rms_norm(x, weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, rows=row_counts, size=sizes)
@few_examples
def test_it_is_within_the_bound(variant: str, dtype: torch.dtype, seed: int, rows: int, size: int) -> None:
    x, weight = random(seed, rows, size, dtype=dtype), random(seed + 1, size, dtype=dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    # The sum of squares in any order, then a division, a sum, a root, another division and a product.
    normed = Bounded(exact, (size + 8) * FLOAT * exact.abs()).rounded(dtype)
    expected = normed.times(Bounded.exactly(weight)).rounded(dtype)
    expected.check(rms_norm(x, weight))
    expected.check(rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, rows=row_counts, size=sizes)
@few_examples
def test_a_row_does_not_depend_on_its_company(
    variant: str, dtype: torch.dtype, seed: int, rows: int, size: int
) -> None:
    x, weight = random(seed, rows, size, dtype=dtype), random(seed + 1, size, dtype=dtype)
    together = rms_norm(x, weight)
    for row in some_rows(rows):
        assert same_bits(together[row : row + 1], rms_norm(x[row : row + 1], weight)), f"row {row}"


def test_any_shape_and_strides_of_x(variant: str) -> None:
    x, weight = random(0, 4, 3, 40).transpose(0, 1), random(1, 40)
    assert same_bits(rms_norm(x, weight).reshape(12, 40), rms_norm(x.reshape(12, 40), weight))
    assert rms_norm(x[0, 0], weight).shape == (40,)
    assert rms_norm(x[:0], weight).shape == (0, 4, 40)


@pytest.mark.parametrize(
    "x, weight, message",
    [
        (torch.zeros(2, 8), torch.zeros(7), r"weight has shape \(7\), expected \(8\)"),
        (torch.zeros(2, 8).double(), torch.zeros(8).double(), "x must be float32 or bfloat16"),
        (torch.zeros(2, 8), torch.zeros(8).bfloat16(), "weight and x must have one dtype"),
        (torch.zeros(2, 8), torch.zeros(16)[::2], "weight must be contiguous"),
        (torch.tensor(1.0), torch.zeros(8), "x needs a dimension"),
    ],
)
def test_refuses(library: Native, x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"specviz::rms_norm: .*{message}"):
        rms_norm(x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_stands_in_for_what_it_computes_and_nothing_else(library: Native, dtype: torch.dtype) -> None:
    """Gemma's norm has the name but scales by 1 + weight; LayerNorm has neither."""
    modules = torch.nn.ModuleList([MixtralRMSNorm(40), GemmaRMSNorm(40), torch.nn.LayerNorm(40)]).to(dtype)
    x = random(0, 5, 40, dtype=dtype)
    with torch.no_grad():
        for module in modules:
            module.weight.copy_(random(1, 40, dtype=dtype))
        before = [module(x) for module in modules]
        use_norm_kernels(modules)
        after = [module(x) for module in modules]
    assert ["forward" in vars(module) for module in modules] == [True, False, False]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new)
