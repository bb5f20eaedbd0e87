"""self_attention: against the operators that it stands for, row by row bit for bit, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DTYPES, few_examples, random, same_bits, seeds

from engine.kernels.attention import chunked_attention
from engine.kernels.native import Native
from engine.kernels.self_attention import AttentionWeights, project, self_attention, self_attention_reference

HIDDEN, SLOTS, LENGTH = 40, 4, 30
#: (heads, kv_heads, dim, rotary): halves that fill vectors and that do not, all features turned or some.
SHAPES = ((4, 2, 16, 16), (3, 1, 12, 6), (2, 2, 64, 64), (6, 3, 20, 10), (1, 1, 70, 66))
shapes, norms = st.sampled_from(SHAPES), st.sampled_from((None, "each head", "all heads"))


def weights_for(seed: int, shape: tuple[int, int, int, int], norm: str | None, bias: bool, dtype) -> AttentionWeights:
    heads, kv_heads, dim, _ = shape

    def normal(offset: int, *size: int) -> torch.Tensor:
        return random(seed + offset, *size, dtype=dtype, scale=0.3)

    def norm_weight(offset: int, count: int) -> torch.Tensor | None:
        return None if norm is None else normal(offset, dim if norm == "each head" else count * dim) + 1

    rows = (heads + 2 * kv_heads) * dim
    return AttentionWeights(
        normal(1, rows, HIDDEN),
        normal(2, rows) if bias else None,
        norm_weight(3, heads),
        norm_weight(4, kv_heads),
        1e-5,
        normal(5, HIDDEN, heads * dim),
        normal(6, HIDDEN) if bias else None,
        dim**-0.5,
    )


def case(seed: int, shape, rows: int, batch: int, dtype):
    """x, cos, sin, key, value, slots, starts."""
    _, kv_heads, dim, rotary = shape
    draw = torch.Generator().manual_seed(seed)
    angles = random(seed + 7, batch, rows, rotary)
    starts = torch.randint(0, LENGTH - rows + 1, (batch,), generator=draw)
    caches = (random(seed + n, SLOTS, kv_heads, LENGTH, dim, dtype=dtype) for n in (8, 9))
    slots = torch.randperm(SLOTS, generator=draw)[:batch]
    x = random(seed, batch, rows, HIDDEN, dtype=dtype)
    return x, angles.cos().to(dtype), angles.sin().to(dtype), *caches, slots, starts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    seed=seeds, shape=shapes, norm=norms, bias=st.booleans(), rows=st.sampled_from((1, 3, 9)), batch=st.integers(1, 3),
    window=st.sampled_from((0, 4)),
)  # fmt: skip
@few_examples
def test_it_is_its_parts(variant: str, dtype: torch.dtype, seed, shape, norm, bias, rows, batch, window) -> None:
    """Against the linear, norm and attention kernels with torch's rotation in between: the same roundings."""
    weights = weights_for(seed, shape, norm, bias, dtype)
    x, cos, sin, key, value, slots, starts = case(seed, shape, rows, batch, dtype)
    expected_key, expected_value = key.clone(), value.clone()
    found = self_attention(x, weights, cos, sin, key, value, slots, starts, window)

    linear = torch.ops.specviz.linear
    flat = linear(x, weights.qkv, weights.qkv_bias)
    # An identity in the place of the projection: `project` then norms and turns what the kernel projected.
    eye = replace(weights, qkv=torch.eye(flat.shape[-1], dtype=dtype), qkv_bias=None)
    query, keys, values = project(flat, eye, cos, sin, shape[1], shape[2])
    places = slots[:, None], starts[:, None] + torch.arange(rows)
    expected_key.transpose(1, 2)[places] = keys
    expected_value.transpose(1, 2)[places] = values
    attended = chunked_attention(
        query.transpose(1, 2), expected_key, expected_value, slots, starts, weights.scale, window
    )  # fmt: skip
    expected = linear(attended.flatten(2), weights.out, weights.out_bias)
    assert torch.equal(value, expected_value)
    # float32: a product may be fused with the sum behind it. bfloat16: a norm may round otherwise than torch's.
    for ours, theirs in ((key, expected_key), (found, expected)):
        tolerance = 1e-5 if dtype == torch.float32 else (0.0 if norm is None else 2.0**-6)
        assert (ours.float() - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference(variant: str, dtype: torch.dtype, shape) -> None:
    weights = weights_for(3, shape, "each head", True, dtype)
    x, cos, sin, key, value, slots, starts = case(4, shape, 5, 2, dtype)
    other_key, other_value = key.clone(), value.clone()
    found = self_attention(x, weights, cos, sin, key, value, slots, starts, 6).float()
    expected = self_attention_reference(x, weights, cos, sin, other_key, other_value, slots, starts, 6).float()
    assert (found - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.03) * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, shape=shapes, norm=norms, rows=st.sampled_from((2, 5, 17)))
@few_examples
def test_a_row_does_not_depend_on_its_company(variant: str, dtype: torch.dtype, seed, shape, norm, rows) -> None:
    weights = weights_for(seed, shape, norm, True, dtype)
    x, cos, sin, key, value, slots, starts = case(seed, shape, rows, 2, dtype)
    alone_key, alone_value = key.clone(), value.clone()
    together = self_attention(x, weights, cos, sin, key, value, slots, starts)
    for b in range(2):
        for r in range(rows):
            one = (t[b : b + 1, r : r + 1].contiguous() for t in (x, cos, sin))
            row, turned_by, turned_with = one
            alone = self_attention(
                row, weights, turned_by, turned_with, alone_key, alone_value, slots[b : b + 1], starts[b : b + 1] + r
            )
            assert same_bits(together[b : b + 1, r : r + 1], alone), f"sequence {b}, row {r}"
    assert same_bits(key, alone_key)
    assert same_bits(value, alone_value)


def test_one_set_of_angles_for_all_sequences(variant: str) -> None:
    shape = SHAPES[0]
    weights = weights_for(0, shape, None, False, torch.float32)
    x, cos, sin, key, value, slots, starts = case(1, shape, 3, 3, torch.float32)
    shared = cos[:1].contiguous(), sin[:1].contiguous()
    repeated = tuple(angle.expand(3, -1, -1).contiguous() for angle in shared)
    results = [
        self_attention(x, weights, *angles, key.clone(), value.clone(), slots, starts) for angles in (shared, repeated)
    ]
    assert same_bits(*results)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(2, HIDDEN)}, r"x has shape \(2, 40\), expected \(\*, \*, \*\)"),
        ({"x": torch.zeros(1, 1, HIDDEN).double()}, "x must be float32 or bfloat16"),
        ({"qkv": torch.zeros(128, HIDDEN).bfloat16()}, "must have one dtype"),
        ({"qkv": torch.zeros(127, HIDDEN)}, r"weight has shape \(127, 40\), expected \(128, \*\)"),
        ({"out": torch.zeros(HIDDEN, 63)}, "out_weight must take whole heads"),
        ({"q_norm": torch.zeros(17)}, r"q_norm has shape \(17\), expected \(64\)"),
        ({"cos": torch.zeros(1, 1, 18)}, "an even part of dim"),
        ({"cos": torch.zeros(1, 1, 15)}, "an even part of dim"),
        ({"sin": torch.zeros(1, 2, 16)}, r"sin has shape \(1, 2, 16\), expected \(1, 1, 16\)"),
        ({"starts": torch.tensor([LENGTH])}, r"starts\[0\] = 30 is not below 30"),
        ({"starts": torch.tensor([-1])}, r"starts\[0\] = -1"),
        ({"slots": torch.tensor([SLOTS])}, r"slots\[0\] = 4 is not below 4"),
        ({"value": torch.zeros(SLOTS, 2, LENGTH, 8)}, "keys and values must have one head size"),
        ({"value": torch.zeros(SLOTS, 2, LENGTH - 1, 16)}, "caches of different sizes"),
        ({"window": -1}, "window must be 0"),
    ],
    ids=str,
)
def test_refuses(library: Native, change: dict, message: str) -> None:
    """And writes nothing."""
    weights = weights_for(0, SHAPES[0], None, False, torch.float32)
    names = ("x", "cos", "sin", "key", "value", "slots", "starts")
    given = dict(zip(names, case(0, SHAPES[0], 1, 1, torch.float32), strict=True)) | {"window": 0}
    weights = replace(weights, **{name: t for name, t in change.items() if name not in given})
    given |= {name: t for name, t in change.items() if name in given}
    before = given["key"].clone()
    with pytest.raises(RuntimeError, match=f"specviz::self_attention: .*{message}"):
        self_attention(given.pop("x"), weights, **given)
    assert torch.equal(given["key"], before)
