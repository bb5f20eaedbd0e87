"""Which device computes."""

from __future__ import annotations

import torch

from engine.errors import UsageError

CPU = torch.device("cpu")


def resolve_device(device: str, link: str) -> torch.device:
    """The device that `device` (auto, cpu, cuda, cuda:N) means behind a link of kind `link`. Raises UsageError.

    A CUDA device is fed from host memory: a disk delivers into main memory, and an emulated link stands for a device
    that is not there.
    """
    if device == "cpu" or (device == "auto" and not (link == "host" and torch.cuda.is_available())):
        return torch.device("cpu")
    if link != "host":
        raise UsageError(f"--device {device} needs --link host, not {link}: its experts come from host memory")
    if not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch finds no CUDA device here, use --device cpu")
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)
