"""Finding the bytes of each expert in a checkpoint: tensors of one expert each, or of all experts of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, Transpose, WeightConverter

from engine.errors import CheckpointError, ModelError
from engine.model import mxfp4
from engine.model.checkpoint import DTYPES, TensorInfo
from engine.model.ffn import DOWN, gate_up_name
from engine.model.layout import ExpertRecord, ExpertShape, ExpertTable, Segment


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint that fills an experts parameter, and how transformers would convert it, if at all.

    `pattern` is the one of the converter's source patterns that its name fits; of a quantized matrix without a
    converter, which part it is.
    """

    info: TensorInfo
    converter: WeightConverter | None
    pattern: str


def matrices(modules: dict[str, Any]) -> set[str]:
    """Names of the parameters that stay on disk; all else in an experts module (biases, norms) is loaded."""
    return {f"{name}.{matrix}" for name, module in modules.items() for matrix in (gate_up_name(module), DOWN)}


def locate_experts(model: PreTrainedModel, modules: dict[str, Any], tensors: dict[str, list[Stored]]) -> ExpertTable:
    """Where every expert of `modules` lies. Raises ModelError for layouts that we cannot read, CheckpointError."""
    shapes = set()
    records = []
    for layer, (name, module) in enumerate(modules.items()):
        names = [f"{name}.{matrix}" for matrix in (gate_up_name(module), DOWN)]
        experts = module.get_parameter(DOWN).shape[0]
        gate_up, down = (_pieces(name, tensors.get(name, []), experts) for name in names)
        shapes.add(_shape(module, [tensors[name][0] for name in names]))
        records.append(tuple(ExpertRecord(layer, e, gate_up[e] + down[e]) for e in range(experts)))
    if len(shapes) != 1 or len({len(layer) for layer in records}) != 1:
        raise ModelError(f"{type(model).__name__} mixes experts of different sizes: that layout is not supported yet")
    shape = shapes.pop()
    for record in (record for layer in records for record in layer):
        if sum(segment.nbytes for segment in record.segments) != shape.nbytes:
            raise CheckpointError(f"expert {record.expert} of layer {record.layer} has the wrong size on disk")
    return ExpertTable(shape, tuple(records))


def _shape(module: Any, stored: list[Stored]) -> ExpertShape:
    """What one expert of `module` is on disk, where `stored` are its first tensors, one a matrix."""
    rows, columns = module.get_parameter(DOWN).shape[1:]
    hidden, intermediate = (columns, rows) if module.is_transposed else (rows, columns)
    turned = {_is_turned(one) for one in stored}
    dtypes = {one.info.dtype for one in stored}
    if len(turned) != 1 or len(dtypes) != 1:
        raise ModelError(f"{type(module).__name__} stores the matrices of an expert in different ways: not supported")
    dtype = dtypes.pop()
    if stored[0].pattern in mxfp4.PARTS:
        return ExpertShape(hidden, intermediate, torch.bfloat16, bool(module.has_gate), mxfp4=True)
    if dtype not in DTYPES:
        raise ModelError(f"the experts are stored as {dtype}: use a checkpoint in {', '.join(DTYPES)}")
    return ExpertShape(hidden, intermediate, DTYPES[dtype], bool(module.has_gate), module.is_transposed ^ turned.pop())


def _is_turned(stored: Stored) -> bool:
    """Whether transformers would transpose it on loading."""
    return stored.converter is not None and any(map(_turns, stored.converter.operations))


def _pieces(name: str, entries: list[Stored], experts: int) -> list[tuple[Segment, ...]]:
    """For each expert, the byte ranges that fill its slice of the fused parameter `name`, in order."""
    if len(entries) == 1 and _is_whole(entries[0]):
        return [(segment,) for segment in _slices(entries[0].info, experts)]
    if sorted(entry.pattern for entry in entries) == sorted(mxfp4.PARTS):
        slices = {entry.pattern: _slices(entry.info, experts) for entry in entries}
        return list(zip(*(slices[part] for part in mxfp4.PARTS), strict=True))
    found: dict[tuple[int, int], Segment] = {}
    parts = 1
    for entry in entries:
        info, converter, pattern = entry.info, entry.converter, entry.pattern
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


def _slices(info: TensorInfo, experts: int) -> list[Segment]:
    """A tensor of all experts of a layer, cut into them."""
    if info.shape[0] != experts:
        raise CheckpointError(f"{info.name} holds {info.shape[0]} experts, the config says {experts}")
    size = info.segment.nbytes // experts
    return [Segment(info.segment.path, info.segment.offset + e * size, size) for e in range(experts)]


def _is_whole(stored: Stored) -> bool:
    """Whether the tensor holds a layer's matrix of all experts as the parameter does, or turned."""
    if stored.converter is None:
        return stored.pattern not in mxfp4.PARTS
    operations = stored.converter.operations
    return len(operations) == 1 and _turns(operations[0])


def _turns(operation: ConversionOps) -> bool:
    """Whether it transposes each expert's matrix, whatever its shape."""
    return isinstance(operation, Transpose) and {operation.dim0, operation.dim1} == {1, 2} and not operation.check_dims


def _expert_index(name: str) -> int:
    """The number behind `experts.` in a per-expert tensor's name."""
    return int(name.split(".experts.")[1].split(".")[0])
