"""The weights that are not routed experts: checked from the headers, then loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate.utils import set_module_tensor_to_device
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from engine.errors import Cancelled, CheckpointError
from engine.model.checkpoint import Checkpoint


def check_shared(model: PreTrainedModel, checkpoint: Checkpoint, shared: dict[str, str], experts: set[str]) -> None:
    """Raise CheckpointError, from the headers alone, for a shared weight that is missing or of another shape."""
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    absent = [tied[0] for tied in names.values() if not any(name in shared or name in experts for name in tied)]
    if absent:
        raise CheckpointError(
            f"the checkpoint lacks {absent[0]}{f' and {len(absent) - 1} more weights' if len(absent) > 1 else ''}: "
            "incomplete download? Fetch it again"
        )
    for target, name in shared.items():
        stored, expected = checkpoint.tensors[name].shape, tuple(model.get_parameter_or_buffer(target).shape)
        if stored != expected:
            raise CheckpointError(f"{name} has shape {stored}, the config says {expected}: files of two models?")


def kept_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """What transformers keeps each parameter or buffer in: routers of many families stay in float32 by its plan."""
    plan = model._get_dtype_plan(dtype)
    pattern, groups, _ = build_glob_alternation(list(plan)) if plan else (None, {}, {})

    def kept_as(name: str) -> torch.dtype:
        match = pattern.search(name) if pattern else None
        return plan[groups[match.lastgroup or ""]] if match else model.get_parameter_or_buffer(name).dtype

    return kept_as


def fill_shared(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    shared: dict[str, str],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> int:
    """Load the shared weights; returns their bytes. Raises CheckpointError when one cannot be read, Cancelled."""
    targets = {name: target for target, name in shared.items()}
    stored = {name: checkpoint.tensors[name].segment.nbytes for name in targets}
    done, total = 0, sum(stored.values())
    kept_as = kept_dtypes(model, dtype)
    for name, tensor in checkpoint.read(list(targets)):
        if cancelled():
            raise Cancelled("loading was cancelled")
        keep = kept_as(targets[name])
        # A copy: what safetensors hands out is a view of the mapped file, and a shard that is cut off or replaced
        # while the engine runs would kill the process at the next look.
        value = tensor.to(device, keep, copy=True)
        set_module_tensor_to_device(model, targets[name], device, value=value, dtype=keep)
        done += stored[name]
        progress(done, total)
    model.tie_weights()
    if device.type != "cpu":
        _move_buffers(model, device)
    kept = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if not p.is_meta}
    return sum(kept.values())


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """What a model computes when it is built (rotary frequencies), and no checkpoint holds."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
