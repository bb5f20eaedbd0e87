"""A transformers model without its experts: built on `meta`, filled with the shared weights only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_module_tensor_to_device
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)
from transformers.integrations import moe

from engine.errors import Cancelled, CheckpointError, ModelError, first_line
from engine.model import mxfp4
from engine.model.checkpoint import DTYPES, Checkpoint
from engine.model.empty import build_empty
from engine.model.ffn import DOWN
from engine.model.layout import ExpertTable
from engine.model.locate import Stored, locate_experts, matrices
from engine.model.probe import probe
from engine.model.seams import EXPERTS

#: Kinds of layers whose memory of the text is keys and values by position, or that have none.
_BY_POSITION = {"full_attention", "sliding_attention", "chunked_attention", "moe", "dense", "sparse"}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


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
) -> Skeleton:
    """Build the architecture and read every weight but the routed experts' matrices; `progress(done, total bytes)`.

    Raises ModelError when the model is no MoE or its experts' layout is unknown, CheckpointError when weights are
    missing, and what `accept` raises of where the experts lie: all before anything large is read. Cancelled when
    `cancelled()` turns true.
    """
    model, modules, experts, shared, checkpoint = _survey(directory, dtype)
    table = locate_experts(model, modules, experts)
    accept(table)
    _check_shared(model, checkpoint, shared, matrices(modules))
    shared_bytes = _fill(model, checkpoint, shared, dtype, progress, cancelled)
    return Skeleton(model, list(modules.values()), table, shared_bytes)


def survey(directory: Path, dtype: torch.dtype) -> tuple[ExpertTable, int]:
    """Where the experts lie, and the bytes of all other weights in `dtype`; reads headers only.

    Raises as `load_skeleton` does, but for shared weights that are missing.
    """
    model, modules, experts, *_ = _survey(directory, dtype)
    model.tie_weights()
    offloaded = matrices(modules)
    kept_as = _kept_dtypes(model, dtype)
    shared = {name: p.numel() for name, p in model.named_parameters() if name not in offloaded}
    shared_bytes = sum(numel * kept_as(name).itemsize for name, numel in shared.items())
    return locate_experts(model, modules, experts), shared_bytes


def _survey(
    directory: Path, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, torch.nn.Module], dict[str, list[Stored]], dict[str, str], Checkpoint]:
    """(model on meta, its experts modules by name, their tensors, shared parameter → tensor name, checkpoint)."""
    model = _build(directory, dtype)
    modules = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not modules:
        raise _no_experts(model.config, directory)
    _check_gates(modules)
    probe(model, list(modules.values()))
    checkpoint = Checkpoint.open(directory)
    experts, shared = _sort_tensors(model, checkpoint, modules)
    return model, modules, experts, shared, checkpoint


def _build(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture without weights, its experts and attention set to ours. Raises ModelError for what has none."""
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json: give a directory that transformers can load")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"transformers cannot read the config of {directory}: {first_line(error)}") from error
    _check_config(config)
    try:
        model = build_empty(config, dtype)
    except ValueError as error:
        raise ModelError(f"transformers has no causal language model for {config.model_type}") from error
    if not model._can_set_experts_implementation():
        raise _no_experts(config, directory)
    model.set_experts_implementation(EXPERTS)
    return model.eval()


def _check_config(config: PreTrainedConfig) -> None:
    """Raise ModelError for what the config alone rules out."""
    if config.is_encoder_decoder:
        raise ModelError(f"{config.model_type} is an encoder-decoder: choose a decoder-only language model")
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ModelError(f"the checkpoint is quantized ({method}): use one in {', '.join(DTYPES)}, or in MXFP4")
    foreign = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _BY_POSITION
    for reason, kinds in (
        ("keep a state that cannot be taken back after a rejected draft", foreign & _RECURRENT),
        ("keep more than keys and values by position, all that the KV cache here has room for", foreign),
    ):
        if kinds:
            raise ModelError(
                f"{config.model_type} has layers of type {', '.join(sorted(kinds))}, which {reason}: choose a model "
                "with plain attention in every layer"
            )


def _no_experts(config: PreTrainedConfig, directory: Path) -> ModelError:
    text = config.get_text_config()
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERT_COUNTS):
        return ModelError(f"transformers {config.model_type} does not route its experts through the experts interface")
    return ModelError(
        f"{directory.name} ({config.model_type}) is not a Mixture-of-Experts model: choose one with routed experts"
    )


def _is_experts(module: torch.nn.Module) -> bool:
    """True for a class that `use_experts_implementation` decorated (it sets these attributes)."""
    return hasattr(module, "is_transposed") and hasattr(module, "is_concatenated") and hasattr(module, DOWN)


def _check_gates(modules: dict[str, Any]) -> None:
    """Raise ModelError for interleaved gate and up that the module does not take apart itself."""
    for name, module in modules.items():
        if module.has_gate and not module.is_concatenated and type(module)._apply_gate is moe._default_apply_gate:
            raise ModelError(f"the experts of {name} interleave gate and up, but say nothing of how to split them")


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


def _check_shared(model: PreTrainedModel, checkpoint: Checkpoint, shared: dict[str, str], experts: set[str]) -> None:
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


def _kept_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """What transformers keeps each parameter or buffer in: routers of many families stay in float32 by its plan."""
    plan = model._get_dtype_plan(dtype)
    pattern, groups, _ = build_glob_alternation(list(plan)) if plan else (None, {}, {})

    def kept_as(name: str) -> torch.dtype:
        match = pattern.search(name) if pattern else None
        return plan[groups[match.lastgroup or ""]] if match else model.get_parameter_or_buffer(name).dtype

    return kept_as


def _fill(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    shared: dict[str, str],
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> int:
    """Load the shared weights; returns their bytes. Raises CheckpointError when one cannot be read, Cancelled."""
    targets = {name: target for target, name in shared.items()}
    stored = {name: checkpoint.tensors[name].segment.nbytes for name in targets}
    done, total = 0, sum(stored.values())
    kept_as = _kept_dtypes(model, dtype)
    for name, tensor in checkpoint.read(list(targets)):
        if cancelled():
            raise Cancelled("loading was cancelled")
        keep = kept_as(targets[name])
        # A copy: what safetensors hands out is a view of the mapped file, and a shard that is cut off or replaced
        # while the engine runs would kill the process at the next look.
        set_module_tensor_to_device(model, targets[name], "cpu", value=tensor.to(keep, copy=True), dtype=keep)
        done += stored[name]
        progress(done, total)
    model.tie_weights()
    kept = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if not p.is_meta}
    return sum(kept.values())
