"""quantized_moe: against float64, against the 16-bit experts and row by row bit for bit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    ACTIVATIONS,
    BITS,
    DTYPES,
    FLOAT,
    Bounded,
    QuantizedExperts,
    choice,
    expert_sizes,
    few_examples,
    random,
    row_counts,
    same_bits,
    seeds,
    some_rows,
)

from engine.kernels.native import Native
from engine.offload.quantize import quantize_planes

dtypes = st.sampled_from(DTYPES)
thread_counts = st.integers(1, 3)
mixes = st.sampled_from([(1, 1, None), (4, 2, None), (4, 1, 2), (9, 3, None)])
Mix = tuple[int, int, "int | None"]


@pytest.mark.parametrize("bits", BITS)
@given(
    seed=seeds,
    dtype=dtypes,
    rows=row_counts,
    shape=expert_sizes,
    mix=mixes,
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
@few_examples
def test_it_is_within_the_bound(
    variant: str,
    bits: int,
    seed: int,
    dtype: torch.dtype,
    rows: int,
    shape: tuple[int, int],
    mix: Mix,
    activation: str,
) -> None:
    (hidden, intermediate), (count, top_k, only) = shape, mix
    experts = QuantizedExperts.random(seed, bits, count, hidden, intermediate)
    x, index = random(seed, rows, hidden, dtype=dtype), choice(seed, rows, top_k, count, only=only)
    weights = random(seed + 1, rows, top_k)
    found = experts.run(x, index, weights, activation)
    assert found.dtype == dtype

    value, error, size = (torch.zeros(rows, hidden, dtype=torch.float64) for _ in range(3))
    for expert in index.unique().tolist():
        row, place = (index == expert).nonzero(as_tuple=True)
        one = experts.weights.expected(expert, x[row].bfloat16(), activation)
        weight = weights[row, place].double()[:, None]
        value.index_add_(0, row, weight * one.value)
        error.index_add_(0, row, weight.abs() * one.error)
        size.index_add_(0, row, weight.abs() * (one.value.abs() + one.error))
    expected = Bounded(value, error + (top_k + 1) * FLOAT * size)
    (expected.rounded(dtype) if dtype == torch.bfloat16 else expected).check(found)


@pytest.mark.parametrize("bits", BITS)
@given(seed=seeds, dtype=dtypes, rows=row_counts, shape=expert_sizes, mix=mixes)
@few_examples
def test_it_equals_bfloat16_experts_with_the_weights_that_the_codes_stand_for(
    variant: str, bits: int, seed: int, dtype: torch.dtype, rows: int, shape: tuple[int, int], mix: Mix
) -> None:
    """To the last bit, so that no single code can be wrong: both go through the same products."""
    (hidden, intermediate), (count, top_k, only) = shape, mix
    experts = QuantizedExperts.random(seed, bits, count, hidden, intermediate)
    x, index = random(seed, rows, hidden, dtype=dtype), choice(seed, rows, top_k, count, only=only)
    weights = random(seed + 1, rows, top_k)
    plain = torch.ops.specviz.combine(experts.weights.run(x.bfloat16(), index), weights, x)
    assert same_bits(experts.run(x, index, weights), plain)


@pytest.mark.parametrize("bits", BITS)
@given(seed=seeds, dtype=dtypes, rows=row_counts, shape=expert_sizes, mix=mixes, threads=st.integers(1, 3))
@few_examples
def test_a_row_does_not_depend_on_its_company(
    variant: str,
    library: Native,
    bits: int,
    seed: int,
    dtype: torch.dtype,
    rows: int,
    shape: tuple[int, int],
    mix: Mix,
    threads: int,
) -> None:
    (hidden, intermediate), (count, top_k, only) = shape, mix
    experts = QuantizedExperts.random(seed, bits, count, hidden, intermediate)
    x, index = random(seed, rows, hidden, dtype=dtype), choice(seed, rows, top_k, count, only=only)
    weights = random(seed + 1, rows, top_k)
    library.set_threads(threads)
    together = experts.run(x, index, weights)
    library.set_threads(threads % 3 + 1)
    for row in some_rows(rows):
        alone = slice(row, row + 1)
        assert same_bits(together[alone], experts.run(x[alone], index[alone], weights[alone])), f"row {row}"


@pytest.mark.parametrize("bits", BITS)
def test_it_takes_what_the_draft_stores(variant: str, bits: int) -> None:
    """Weights through `quantize`: within the loss of the bits, the experts do what they did before."""
    hidden, intermediate = 96, 64
    gate_up, down = random(0, 2 * intermediate, hidden, scale=0.1), random(1, hidden, intermediate, scale=0.1)
    up, back = (quantize_planes(weight, bits) for weight in (gate_up, down))
    x, index = random(2, 5, hidden), torch.zeros(5, 1, dtype=torch.int64)
    found = torch.ops.specviz.quantized_moe(
        *(x, torch.cat(up.planes, -1)[None], up.scales_and_zeros.transpose(0, 1)[None].contiguous()),
        *(torch.cat(back.planes, -1)[None], back.scales_and_zeros.transpose(0, 1)[None].contiguous()),
        *(index, torch.ones(5, 1), bits, "silu", intermediate),
    )
    gate, lift = (x @ gate_up.t()).chunk(2, dim=-1)
    exact = (torch.nn.functional.silu(gate) * lift) @ down.t()
    lost = (found - exact).norm() / exact.norm()
    assert lost < {8: 0.02, 4: 0.25, 3: 0.5, 2: 1.1}[bits]


@pytest.mark.parametrize("bits", BITS)
def test_float32_activations_are_rounded_to_bfloat16_first(variant: str, bits: int) -> None:
    experts, index = QuantizedExperts.random(0, bits, 3, 100, 33), choice(0, 9, 2, 3)
    x, weights = random(1, 9, 100), random(2, 9, 2)
    assert same_bits(experts.run(x, index, weights), experts.run(x.bfloat16().float(), index, weights))


@pytest.mark.parametrize("bits", BITS)
def test_a_bad_row_stays_alone(variant: str, bits: int) -> None:
    experts, index = QuantizedExperts.random(0, bits, 3, 100, 33), choice(0, 20, 2, 3)
    x, weights = random(1, 20, 100), random(2, 20, 2)
    good = experts.run(x, index, weights)
    x[4, 7], x[11, 99] = float("nan"), float("inf")
    found = experts.run(x, index, weights)
    others = [row for row in range(20) if row not in (4, 11)]
    assert same_bits(found[others], good[others])
    assert found[4].isnan().all() and not found[11].isfinite().any()


def test_no_rows_at_all(variant: str) -> None:
    experts = QuantizedExperts.random(0, 4, 3, 100, 33)
    assert experts.run(random(1, 0, 100), choice(0, 0, 2, 3), random(2, 0, 2)).shape == (0, 100)


def arguments() -> dict[str, Any]:
    """Two experts of 40 features and 8 intermediate ones, 3 rows, 4 bits."""
    return {
        "x": torch.zeros(3, 40),
        "gate_up": torch.zeros(2, 16, 2, 16, dtype=torch.uint8),
        "gate_up_scales": torch.zeros(2, 16, 2, 2, dtype=torch.bfloat16),
        "down": torch.zeros(2, 40, 1, 16, dtype=torch.uint8),
        "down_scales": torch.zeros(2, 40, 1, 2, dtype=torch.bfloat16),
        "index": torch.zeros(3, 2, dtype=torch.int64),
        "weights": torch.zeros(3, 2),
        "bits": 4,
        "activation": "silu",
        "intermediate": 8,
    }


REFUSED = {
    "one-dimensional x": ({"x": torch.zeros(40)}, "x has shape"),
    "float64": ({"x": torch.zeros(3, 40).double()}, "x must be float32 or bfloat16"),
    "5 bits": ({"bits": 5}, "bits must be 8, 4, 3 or 2"),
    "other bits": ({"bits": 3}, r"gate_up has shape \(2, 16, 2, 16\), expected \(2, 16, 2, 12\)"),
    "three-dimensional codes": ({"gate_up": torch.zeros(2, 16, 32, dtype=torch.uint8)}, "gate_up must be codes"),
    "signed codes": ({"gate_up": torch.zeros(2, 16, 2, 16, dtype=torch.int8)}, "gate_up must be uint8"),
    "codes of fewer groups": ({"gate_up": torch.zeros(2, 16, 1, 16, dtype=torch.uint8)}, "gate_up has shape"),
    "down for fewer experts": ({"down": torch.zeros(1, 40, 1, 16, dtype=torch.uint8)}, "down has shape"),
    "strided down": ({"down": torch.zeros(2, 40, 2, 16, dtype=torch.uint8)[:, :, ::2]}, "down must be contiguous"),
    "float32 scales": ({"gate_up_scales": torch.zeros(2, 16, 2, 2)}, "gate_up_scales must be bfloat16"),
    "scales for fewer rows": (
        {"down_scales": torch.zeros(2, 39, 1, 2, dtype=torch.bfloat16)},
        "down_scales has shape",
    ),
    "no such expert": ({"index": torch.tensor([[0, 1], [2, 0], [0, 0]])}, "index holds 2, which is no expert"),
    "a negative expert": ({"index": torch.tensor([[0, 1], [-1, 0], [0, 0]])}, "index holds -1"),
    "int32 index": ({"index": torch.zeros(3, 2, dtype=torch.int32)}, "index must be int64"),
    "index for other rows": ({"index": torch.zeros(4, 2, dtype=torch.int64)}, "index has shape"),
    "strided index": ({"index": torch.zeros(2, 3, dtype=torch.int64).t()}, "index must be contiguous"),
    "weights for another top-k": ({"weights": torch.zeros(3, 1)}, "weights has shape"),
    "bfloat16 weights": ({"weights": torch.zeros(3, 2).bfloat16()}, "weights must be float32"),
    "unknown activation": ({"activation": "relu"}, "unknown activation relu"),
    "another intermediate": ({"intermediate": 9}, "gate_up has shape"),
    "no intermediate": ({"intermediate": 0}, "intermediate must be positive"),
    "a negative intermediate": (
        {"intermediate": -1, "down": torch.zeros(2, 40, 0, 16, dtype=torch.uint8)}
        | {"down_scales": torch.zeros(2, 40, 0, 2, dtype=torch.bfloat16)},
        "intermediate must be positive",
    ),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED.keys())
def test_refuses(library: Native, changes: dict[str, Any], message: str) -> None:
    assert not torch.ops.specviz.quantized_moe(**arguments()).any()
    with pytest.raises(RuntimeError, match=f"specviz::quantized_moe: .*{message}"):
        torch.ops.specviz.quantized_moe(**{**arguments(), **changes})
