"""Linear layers through the compiled kernel: row-invariant, and at memory speed for a few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels.pages import LARGE, copies

# What makes another weight of a weight: a router that computes in float32 casts its own first.
_CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.Tensor.bfloat16)
_DTYPES = (torch.float32, torch.bfloat16)


class KernelWeight(torch.nn.Parameter):
    """A weight `(out, in)` whose linear products are computed by the kernel, wherever a model calls for them.

    `F.linear(x, weight, bias)` is the one call that projections, routers and output heads of transformers share, so
    no module has to be replaced. Every other use of the weight (an embedding's lookup, say) stays torch's own.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return kernel_linear(*args, **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
        if func in _CASTS and isinstance(args[0], KernelWeight):
            return result.as_subclass(KernelWeight)
        return result


def use_linear_kernel(model: torch.nn.Module) -> None:
    """Let the kernel compute every linear layer of `model` whose weight is on the CPU; tied weights stay tied."""
    replaced: dict[int, KernelWeight] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dim() != 2 or parameter.device.type != "cpu":
                continue
            if parameter.dtype not in _DTYPES:
                continue
            if id(parameter) not in replaced:
                replaced[id(parameter)] = KernelWeight(in_large_pages(parameter.data), requires_grad=False)
            module._parameters[name] = replaced[id(parameter)]


def in_large_pages(weight: torch.Tensor) -> torch.Tensor:
    """`weight`, copied into large pages if it is large itself."""
    return copies(weight) if weight.nbytes >= LARGE else weight


def kernel_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` by the kernel; by torch for what the kernel does not take."""
    if input.dtype != weight.dtype or input.dtype not in _DTYPES:
        return F.linear(input, weight, bias)
    return torch.ops.specviz.linear.default(input, weight.contiguous(), bias)
