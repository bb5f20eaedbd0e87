"""A transformers model without its experts: built on `meta`, filled with the shared weights only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from engine.errors import ModelError
from engine.model import mxfp4
from engine.model.architecture import build_architecture
from engine.model.checkpoint import Checkpoint
from engine.model.device import CPU
from engine.model.layout import ExpertTable
from engine.model.locate import Stored, locate_experts, matrices
from engine.model.shared import check_shared, fill_shared, kept_dtypes


@dataclass
class Skeleton:
    """The model whose experts modules are empty shells, and the table that says where experts lie.

    `experts_modules[layer]` is the experts module of MoE layer `layer`.
    """

    model: PreTrainedModel
    experts_modules: list[torch.nn.Module]
    table: ExpertTable
    shared_bytes: int


def load_skeleton(
    directory: Path,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    accept: Callable[[ExpertTable], None] = lambda table: None,
    device: torch.device = CPU,
) -> Skeleton:
    """Build the architecture on `device` and read every weight but the routed experts' matrices.

    `progress(done, total bytes)` hears how far it is.

    Raises ModelError when the model is no MoE or its experts' layout is unknown, CheckpointError when weights are
    missing, and what `accept` raises of where the experts lie: all before anything large is read. Cancelled when
    `cancelled()` turns true.
    """
    model, modules, experts, shared, checkpoint = _survey(directory, dtype)
    table = locate_experts(model, modules, experts)
    accept(table)
    check_shared(model, checkpoint, shared, matrices(modules))
    shared_bytes = fill_shared(model, checkpoint, shared, dtype, device, progress, cancelled)
    return Skeleton(model, list(modules.values()), table, shared_bytes)


def survey(directory: Path, dtype: torch.dtype) -> tuple[ExpertTable, int]:
    """Where the experts lie, and the bytes of all other weights in `dtype`; reads headers only.

    Raises as `load_skeleton` does, but for shared weights that are missing.
    """
    model, modules, experts, *_ = _survey(directory, dtype)
    model.tie_weights()
    offloaded = matrices(modules)
    kept_as = kept_dtypes(model, dtype)
    shared = {name: p.numel() for name, p in model.named_parameters() if name not in offloaded}
    shared_bytes = sum(numel * kept_as(name).itemsize for name, numel in shared.items())
    return locate_experts(model, modules, experts), shared_bytes


def _survey(
    directory: Path, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, torch.nn.Module], dict[str, list[Stored]], dict[str, str], Checkpoint]:
    """(model on meta, its experts modules by name, their tensors, shared parameter → tensor name, checkpoint)."""
    model, modules = build_architecture(directory, dtype)
    checkpoint = Checkpoint.open(directory)
    experts, shared = _sort_tensors(model, checkpoint, modules)
    return model, modules, experts, shared, checkpoint


def _sort_tensors(
    model: PreTrainedModel, checkpoint: Checkpoint, modules: dict[str, torch.nn.Module]
) -> tuple[dict[str, list[Stored]], dict[str, str]]:
    """Checkpoint tensors by what they fill, named by transformers' own conversion mapping.

    Returns (experts parameter → its tensors with the converter that merges them, shared parameter → tensor name).
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    parameters = dict(model.state_dict(keep_vars=True))
    experts: dict[str, list[Stored]] = {}
    offloaded = matrices(modules)
    shared: dict[str, str] = {}
    for name, info in checkpoint.tensors.items():
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if target not in parameters and name in parameters:
            # As transformers does it: a name that is right already, though a pattern meant for another fits it.
            target, pattern = name, None
        converter = next((c for c in converters if pattern in c.source_patterns), None) if pattern else None
        matrix, _, part = target.rpartition("_")
        if part in mxfp4.PARTS and matrix in offloaded:
            experts.setdefault(matrix, []).append(Stored(info, None, part))
        elif target in offloaded:
            experts.setdefault(target, []).append(Stored(info, converter, pattern or ""))
        elif converter is not None and target in parameters:
            raise ModelError(f"{name} needs a conversion on loading that is not supported: {type(model).__name__}")
        elif target in parameters:
            shared[target] = name
    return experts, shared
