from __future__ import annotations

import pytest
import torch

from engine.offload.quantize import (
    FusedInt4Matrix,
    PlaneMatrix,
    has_fused_int4,
    quantize,
    quantize_expert,
    quantize_planes,
    quantized_nbytes,
)

SHAPES = [(256, 192), (40, 96), (24, 50), (1, 7), (16, 33)]
BITS = (8, 4, 3, 2)


def matrix(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05 + 0.01


def error_bound(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Half a step, plus what rounding the pair to bfloat16 (8 significant bits) may move the two ends by."""
    bound = torch.empty_like(weight)
    for start in range(0, weight.shape[1], 32):
        group = weight[:, start : start + 32]
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        step = (high - low) / (2**bits - 1)
        bound[:, start : start + 32] = (
            step * (0.5 + 2.0**-8) + (high - low) * 2.0**-8 + torch.maximum(low.abs(), high.abs()) * 2.0**-8
        )
    return bound * 1.001 + 1e-7


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_error_is_within_half_a_step(shape: tuple[int, int], bits: int) -> None:
    weight = matrix(shape)
    error = (quantize(weight, bits).dequantize(torch.float32) - weight).abs()
    assert (error <= error_bound(weight, bits)).all()


def test_fewer_bits_lose_more() -> None:
    weight = matrix((64, 128))
    errors = [(quantize(weight, bits).dequantize(torch.float32) - weight).norm().item() for bits in BITS]
    assert errors == sorted(errors) and errors[0] * 10 < errors[1]


@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_grid_survive_exactly(bits: int) -> None:
    codes = torch.arange(64 * 64).view(64, 64) * 7 % 2**bits
    codes[:, ::32], codes[:, 1::32] = 0, 2**bits - 1
    weight = (codes - 2 ** (bits - 1)) * 0.25
    assert torch.equal(quantize(weight, bits).dequantize(torch.float32), weight)


@pytest.mark.parametrize("bits", BITS)
def test_a_constant_group_is_that_constant(bits: int) -> None:
    weight = torch.full((16, 32), 0.375)
    assert torch.equal(quantize(weight, bits).dequantize(torch.float32), weight)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_packed_at_their_bits(bits: int) -> None:
    rows, columns = 256, 192
    held = quantize(matrix((rows, columns)), bits)
    # Independent count: bits a weight, and 2 bfloat16 for each 32 of them.
    assert held.nbytes == rows * columns * bits // 8 + rows * columns // 32 * 4
    assert held.nbytes == quantized_nbytes((rows, columns), bits)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_planned_bytes_are_the_held_ones(shape: tuple[int, int], bits: int) -> None:
    held = quantize(matrix(shape), bits)
    tensors = [v for v in vars(held).values() if isinstance(v, torch.Tensor)] + list(getattr(held, "planes", []))
    assert held.nbytes == quantized_nbytes(shape, bits) == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_multiplies_by_the_dequantized_matrix(
    shape: tuple[int, int], bits: int, rows: int, dtype: torch.dtype
) -> None:
    held = quantize(matrix(shape), bits)
    x = matrix((rows, shape[1]), seed=1).to(dtype)
    y = held.linear(x)
    assert y.dtype == dtype and y.shape == (rows, shape[0])
    exact = x.double() @ held.dequantize(torch.float32).double().t()
    # Products of bfloat16 numbers, rounded once at the end: 1/256 of the sum of magnitudes covers both.
    scale = x.double().abs() @ held.dequantize(torch.float32).double().abs().t()
    assert ((y.double() - exact).abs() <= scale / 128 + 1e-6).all()


@pytest.mark.skipif(not has_fused_int4(), reason="this build of torch has no fused 4-bit product")
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_and_plane_forms_hold_the_same_codes(shape: tuple[int, int]) -> None:
    weight = matrix(shape)
    fused, planes = quantize(weight, 4), quantize_planes(weight, 4)
    assert isinstance(fused, FusedInt4Matrix) and isinstance(planes, PlaneMatrix)
    assert torch.equal(fused.codes(), planes.codes())
    assert torch.equal(fused.dequantize(torch.float32), planes.dequantize(torch.float32))


def test_an_expert_is_two_matrices() -> None:
    expert = quantize_expert(matrix((64, 32)), matrix((32, 32)), 3)
    assert expert.nbytes == quantized_nbytes((64, 32), 3) + quantized_nbytes((32, 32), 3)


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="8, 4, 3, 2"):
        quantize(matrix((16, 32)), 5)
