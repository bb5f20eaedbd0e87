"""A transformers model without its experts: built on `meta`, filled with the shared weights only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from engine.errors import CheckpointError, ModelError
from engine.model.checkpoint import DTYPES, Checkpoint, TensorInfo
from engine.model.layout import ExpertRecord, ExpertShape, ExpertTable, Segment
from engine.model.seams import ATTENTION, EXPERTS

GATE_UP, DOWN = "gate_up_proj", "down_proj"
# The kinds of layers that keep keys and values by position; recurrent ones keep a state.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass
class Skeleton:
    """The model whose experts modules are empty shells, and the table that says where experts lie.

    `experts_modules[layer]` is the experts module of MoE layer `layer`.
    """

    model: PreTrainedModel
    experts_modules: list[torch.nn.Module]
    table: ExpertTable
    shared_bytes: int


def load_skeleton(directory: Path, dtype: torch.dtype) -> Skeleton:
    """Build the architecture and read every weight but the routed experts'.

    Raises ModelError when the model is no MoE or its experts' layout is unknown, CheckpointError when
    weights are missing. Both happen before anything large is read.
    """
    model, modules, experts, shared, checkpoint = _survey(directory, dtype)
    table = _expert_table(model, modules, experts)
    shared_bytes = _fill(model, checkpoint, shared, dtype, set(modules))
    return Skeleton(model, list(modules.values()), table, shared_bytes)


def survey(directory: Path, dtype: torch.dtype) -> tuple[ExpertTable, int]:
    """Where the experts lie, and the bytes of all other weights in `dtype`; reads headers only.

    Raises as `load_skeleton` does, but for shared weights that are missing.
    """
    model, modules, experts, *_ = _survey(directory, dtype)
    model.tie_weights()
    inside = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    shared_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)
    return _expert_table(model, modules, experts), shared_bytes


def _survey(
    directory: Path, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, torch.nn.Module], dict[str, list], dict[str, str], Checkpoint]:
    """(model on meta, its experts modules by name, their tensors, shared parameter → tensor name, checkpoint)."""
    model = _build(directory, dtype)
    modules = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not modules:
        raise ModelError(
            f"{type(model).__name__} has no routed experts that transformers exposes: choose a Mixture-of-Experts model"
        )
    for name, module in modules.items():
        _check_layout(name, module)
    checkpoint = Checkpoint.open(directory)
    experts, shared = _sort_tensors(model, checkpoint, set(modules))
    return model, modules, experts, shared, checkpoint


def _build(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json: give a directory that transformers can load")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"transformers cannot read the config of {directory}: {_first_line(error)}") from error
    if not _has_experts(config):
        raise ModelError(
            f"{directory.name} ({config.model_type}) is not a Mixture-of-Experts model: choose one with routed experts"
        )
    foreign = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - ATTENTION_LAYERS)
    if foreign:
        raise ModelError(
            f"{config.model_type} has layers of type {', '.join(foreign)}, whose state cannot be taken back after a "
            "rejected draft: choose a model with attention in every layer"
        )
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ModelError(f"transformers has no causal language model for {config.model_type}") from error
    if not model._can_set_experts_implementation():
        raise ModelError(f"transformers {config.model_type} does not route its experts through the experts interface")
    model.set_experts_implementation(EXPERTS)
    model.set_attn_implementation(ATTENTION)
    return model.eval()


def _has_experts(config) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def _is_experts(module: torch.nn.Module) -> bool:
    """True for a class that `use_experts_implementation` decorated (it sets these attributes)."""
    return hasattr(module, "is_transposed") and hasattr(module, "is_concatenated") and hasattr(module, DOWN)


def _check_layout(name: str, module: torch.nn.Module) -> None:
    refused = {
        "transposed weights": module.is_transposed,
        "interleaved gate and up": not module.is_concatenated,
        "biases": module.has_bias,
        "no gate": not module.has_gate,
        "a norm after each expert": getattr(module, "has_post_expert_norm", False),
    }
    reasons = [what for what, present in refused.items() if present]
    if reasons:
        raise ModelError(f"the experts of {name} have a layout that is not supported yet: {', '.join(reasons)}")


def _sort_tensors(
    model: PreTrainedModel, checkpoint: Checkpoint, experts_names: set[str]
) -> tuple[dict[str, list[tuple[TensorInfo, WeightConverter | None, str | None]]], dict[str, str]]:
    """Checkpoint tensors by what they fill, named by transformers' own conversion mapping.

    Returns (experts parameter → its tensors with the converter that merges them, shared parameter → tensor name).
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    parameters = dict(model.state_dict(keep_vars=True))
    experts: dict[str, list] = {}
    shared: dict[str, str] = {}
    for name, info in checkpoint.tensors.items():
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        converter = next((c for c in converters if pattern in c.source_patterns), None) if pattern else None
        if target.rpartition(".")[0] in experts_names:
            experts.setdefault(target, []).append((info, converter, pattern))
        elif converter is not None and target in parameters:
            raise ModelError(f"{name} needs a conversion on loading that is not supported: {type(model).__name__}")
        elif target in parameters:
            shared[target] = name
    return experts, shared


def _expert_table(model: PreTrainedModel, modules: dict[str, torch.nn.Module], tensors: dict[str, list]) -> ExpertTable:
    shapes = set()
    records = []
    for layer, (name, module) in enumerate(modules.items()):
        experts, double, hidden = getattr(module, GATE_UP).shape
        gate_up = _pieces(f"{name}.{GATE_UP}", tensors.get(f"{name}.{GATE_UP}", []), experts)
        down = _pieces(f"{name}.{DOWN}", tensors.get(f"{name}.{DOWN}", []), experts)
        shapes.add((hidden, double // 2, tensors[f"{name}.{DOWN}"][0][0].dtype))
        records.append(tuple(ExpertRecord(layer, e, gate_up[e] + down[e]) for e in range(experts)))
    if len(shapes) != 1 or len({len(layer) for layer in records}) != 1:
        raise ModelError(f"{type(model).__name__} mixes experts of different sizes: that layout is not supported yet")
    hidden, intermediate, stored = shapes.pop()
    if stored not in DTYPES:
        raise ModelError(f"the experts are stored as {stored}: use a checkpoint in {', '.join(DTYPES)}")
    shape = ExpertShape(hidden, intermediate, DTYPES[stored])
    for record in (record for layer in records for record in layer):
        if sum(segment.nbytes for segment in record.segments) != shape.nbytes:
            raise CheckpointError(f"expert {record.expert} of layer {record.layer} has the wrong size on disk")
    return ExpertTable(shape, tuple(records))


def _pieces(name: str, entries: list, experts: int) -> list[tuple[Segment, ...]]:
    """For each expert, the byte ranges that fill its slice of the fused parameter `name`, in order."""
    if len(entries) == 1 and entries[0][1] is None:
        info = entries[0][0]
        if info.shape[0] != experts:
            raise CheckpointError(f"{info.name} holds {info.shape[0]} experts, the config says {experts}")
        size = math.prod(info.shape[1:]) * info.segment.nbytes // math.prod(info.shape)
        return [(Segment(info.segment.path, info.segment.offset + e * size, size),) for e in range(experts)]
    found: dict[tuple[int, int], Segment] = {}
    parts = 1
    for info, converter, pattern in entries:
        if converter is None or not all(isinstance(op, (MergeModulelist, Concatenate)) for op in converter.operations):
            raise ModelError(f"{info.name}: its layout on disk is not supported yet")
        parts = len(converter.source_patterns)
        found[_expert_index(info.name), converter.source_patterns.index(pattern)] = info.segment
    absent = [(e, part) for e in range(experts) for part in range(parts) if (e, part) not in found]
    if absent:
        raise CheckpointError(
            f"{name}: the checkpoint lacks weights of {len({e for e, _ in absent})} of {experts} experts "
            f"(the first is expert {absent[0][0]}): incomplete download? Fetch it again"
        )
    return [tuple(found[e, part] for part in range(parts)) for e in range(experts)]


def _expert_index(name: str) -> int:
    """The number behind `experts.` in a per-expert tensor's name."""
    return int(name.split(".experts.")[1].split(".")[0])


def _fill(
    model: PreTrainedModel, checkpoint: Checkpoint, shared: dict[str, str], dtype: torch.dtype, experts: set[str]
) -> int:
    """Load the shared weights; returns their bytes. Raises CheckpointError when one is missing."""
    targets = {name: target for target, name in shared.items()}
    for name, tensor in checkpoint.read(list(targets)):
        target = targets[name]
        expected = model.get_parameter_or_buffer(target).shape
        if tensor.shape != expected:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, the config says {tuple(expected)}: files of two models?"
            )
        keep = tensor.dtype if not tensor.is_floating_point() else dtype
        set_module_tensor_to_device(model, target, "cpu", value=tensor.to(keep), dtype=keep)
    model.tie_weights()
    absent = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name.rpartition(".")[0] not in experts
    ]
    if absent:
        raise CheckpointError(
            f"the checkpoint lacks {absent[0]}{f' and {len(absent) - 1} more weights' if len(absent) > 1 else ''}: "
            "incomplete download? Fetch it again"
        )
    kept = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if not p.is_meta}
    return sum(kept.values())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
