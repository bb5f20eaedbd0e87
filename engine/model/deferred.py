"""Tensors that transformers hands from one of our functions to another, made only if somebody on the way looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Deferred:
    """Stands for a tensor that a model usually passes on untouched: its cached keys, its mask.

    Our attention reads what the subclass knows (the whole cache, the window). Modeling code that treats it as a
    tensor (latent attention expands the keys it gets from the cache) gets the tensor, made by `make()` once.
    """

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._tensor: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The tensor itself."""
        if self._tensor is None:
            self._tensor = self._make()
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __invert__(self) -> torch.Tensor:
        return ~self.tensor()

    def __and__(self, other: Any) -> torch.Tensor:
        return self.tensor() & other

    def __add__(self, other: Any) -> torch.Tensor:
        return self.tensor() + other

    def __mul__(self, other: Any) -> torch.Tensor:
        return self.tensor() * other

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_plain(args), **_plain(kwargs or {}))


def plain(value: torch.Tensor | Deferred) -> torch.Tensor:
    """The tensor that `value` is or stands for."""
    return value.tensor() if isinstance(value, Deferred) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return plain(value)
