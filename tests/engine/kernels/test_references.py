"""Each operator and the torch reference beside it say the same, up to rounding."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import ACTIVATIONS, BITS, DTYPES, Experts, QuantizedExperts, choice, grouped, random

from engine.kernels import experts as kernels
from engine.offload.quantize import quantize_planes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts(variant: str, dtype: torch.dtype, activation: str) -> None:
    experts, x, index = Experts.random(1, 4, 96, 40, dtype), random(2, 9, 96, dtype=dtype), choice(3, 9, 2, 4)
    gates = random(4, 9, 2).softmax(-1)
    results = []
    for ffn, combine in (
        (kernels.expert_ffn, kernels.combine),
        (kernels.expert_ffn_reference, kernels.combine_reference),
    ):
        out = torch.empty(18, 96)
        ffn(x, experts.gate_up, experts.down, *grouped(index, 4), out, activation)
        results.append(combine(out.view(9, 2, 96), gates, x))
    assert results[0].dtype == results[1].dtype == dtype
    close(*results, dtype)


@pytest.mark.parametrize("bits", BITS)
def test_quantized_experts(variant: str, bits: int) -> None:
    experts, x, index = QuantizedExperts.random(5, bits, 4, 100, 33), random(6, 7, 100), choice(7, 7, 2, 4)
    packed = (experts.gate_up, experts.gate_up_scales), (experts.down, experts.down_scales)
    gates = random(8, 7, 2).softmax(-1)
    arguments = (x, *packed, index, gates, bits, "silu")
    close(kernels.quantized_moe(*arguments), kernels.quantized_moe_reference(*arguments), torch.bfloat16)


@pytest.mark.parametrize("bits", BITS)
def test_the_layout_of_codes_is_that_of_quantize(bits: int) -> None:
    matrix = quantize_planes(random(9, 12, 100), bits)
    codes, scales = matrix.packed()
    assert torch.equal(kernels.dequantize(codes[None], scales[None], 0, 100, bits), matrix.dequantize(torch.bfloat16))


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    # torch rounds to bfloat16 after each step, the kernels after the activation and at the end.
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    scale = expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= tolerance * scale
