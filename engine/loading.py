"""Everything between a path and an engine that can run: model, link, cache, draft copy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from engine.config import EngineConfig, draft_model_id
from engine.control.presets import find_preset
from engine.errors import BudgetError, Cancelled, ModelError
from engine.kernels.native import Native, native
from engine.machine import available_bytes
from engine.model.activation import kernel_activation
from engine.model.checkpoint import resolve_directory
from engine.model.device import CPU, resolve_device
from engine.model.draft_model import DraftModel, load_draft_model
from engine.model.layout import ExpertShape, ExpertTable
from engine.model.routers import RouterProbe
from engine.model.runner import ModelRunner
from engine.model.self_attention import use_shared_kernels
from engine.model.skeleton import Skeleton, load_skeleton
from engine.model.text import load_tokenizer
from engine.offload.disk import DiskLink
from engine.offload.draft_layer import DraftLayer, KernelDraftLayer, TorchDraftLayer
from engine.offload.emulated import EmulatedLink
from engine.offload.host import HostSlab, no_room, slab_nbytes
from engine.offload.host_link import HostLink
from engine.offload.links import Link
from engine.offload.pack import open_pack
from engine.offload.source import ExpertSource
from engine.speculation.drafters import self_draft_bits

log = logging.getLogger(__name__)

#: progress(stage, bytes done, bytes in total)
Progress = Callable[[str, int, int], None]

# Until a preset's bandwidth is known, the emulated link must not slow the calibration down.
UNPACED_GBPS = 1000.0

# Experts below this many weights run on one thread: at 74,000 (the embedded model) a second one brought -4 %
# on two free cores, and halved the speed while the other core was busy.
SMALL_EXPERT = 500_000
MOST_THREADS = 16


@dataclass
class LoadedModel:
    """What `load_model` hands to the engine, which closes it."""

    name: str
    skeleton: Skeleton
    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    source: ExpertSource | HostSlab
    link: Link
    slots_per_layer: int
    #: Slots beyond those that layers share.
    extra_slots: int = 0
    draft_experts: list[DraftLayer] = field(default_factory=list)
    draft_model: DraftModel | None = None
    router_probe: RouterProbe | None = None
    #: Names of KERNELS that compute here; none where there is no compiler.
    kernels: frozenset[str] = frozenset()
    #: Threads that compute, of torch or of the kernels.
    threads: int = 1
    device: torch.device = CPU
    #: Whether missed experts may be computed by the kernels in main memory, whatever device computes the rest.
    host_kernels: bool = False

    def close(self) -> None:
        self.link.close()
        self.source.close()


def load_model(config: EngineConfig, progress: Progress, cancelled: Callable[[], bool]) -> LoadedModel:
    """Load all but the routed experts, quantize the draft's copy of those, and open the link to them.

    Raises ModelError, CheckpointError, BudgetError; Cancelled when `cancelled()` turns true.
    """
    if config.link.preset is not None:
        find_preset(config.link.preset)
    directory = resolve_directory(config.model)
    dtype = getattr(torch, config.dtype)
    progress("shared weights", 0, 0)
    device = resolve_device(config.device, config.link.kind)
    skeleton = load_skeleton(
        directory, dtype, lambda done, total: progress("shared weights", done, total), cancelled,
        lambda table: _check_pack(config, table), device,
    )  # fmt: skip
    table = skeleton.table
    threads = config.threads or default_threads(table.shape)
    torch.set_num_threads(threads)
    host_kernels = _choose_kernels(config, threads)
    # They compute in main memory: behind a CUDA device only missed experts, where those lie.
    kernels = host_kernels if device.type == "cpu" else frozenset()
    use_shared_kernels(skeleton.model, kernels)
    sizes = table.experts, table.layers, table.shape.numel * dtype.itemsize
    slots, extra = config.cache.slots_per_layer(*sizes), config.cache.extra_slots(*sizes)
    if slots < 1:
        need = table.layers * table.shape.numel * dtype.itemsize
        raise BudgetError(
            f"the cache budget of {config.cache.nbytes} bytes holds no expert a layer: this model needs at least "
            f"{need} bytes ({need / 2**20:.1f} MiB, one slot in each of {table.layers} layers)"
        )
    tokenizer = load_tokenizer(directory)
    draft_model = _draft_model(config, tokenizer, device, kernels, progress)
    probe = RouterProbe(skeleton)
    if config.prefetch == "next-layer" and not probe.available:
        raise ModelError("this model's routers do not hand out their choice: use --prefetch draft or none")
    table = _pack(config, table, directory, progress, cancelled)
    source = _open_source(config, table, device, progress, cancelled)
    try:
        draft = _quantize_all(source, device, config.draft, _draft_layers(skeleton, kernels), progress, cancelled)
        runner = ModelRunner(skeleton.model, skeleton.experts_modules, native_attention="attention" in kernels)
        eos_ids = _eos_ids(directory, skeleton, tokenizer)
        link = _open_link(config, source, device)
    except BaseException:
        source.close()
        raise
    if "linear" in kernels:
        # What is left to torch is small. Its idle threads spin for milliseconds after each operation, on the very
        # cores that the kernels' threads wake up on: with both, linear layers took 7 ms instead of 0.1 ms.
        torch.set_num_threads(1)
    return LoadedModel(
        os.path.basename(os.path.normpath(directory)),
        skeleton,
        runner,
        tokenizer,
        eos_ids,
        source,
        link,
        slots,
        extra,
        draft,
        draft_model,
        probe if probe.available else None,
        kernels,
        threads,
        device,
        "experts" in host_kernels,
    )


def _check_pack(config: EngineConfig, table: ExpertTable) -> None:
    if table.shape.mxfp4 and not config.pack and config.link.kind != "host":
        raise ModelError("experts in MXFP4 are unpacked once, into the pack: run without --no-pack")


def _pack(
    config: EngineConfig, table: ExpertTable, directory: Path, progress: Progress, cancelled: Callable[[], bool]
) -> ExpertTable:
    """`table`, in the pack if the configuration wants one and the disk has room. A host link reads shards only once."""
    if not config.pack or config.link.kind == "host":
        return table

    def packing(done: int, total: int) -> None:
        progress("packing experts", done, total)

    try:
        return open_pack(table, directory, progress=packing, cancelled=cancelled)
    except BudgetError as error:
        if table.shape.mxfp4:
            raise
        log.warning("%s; reading byte ranges of the shards instead", error)
        return table


def _draft_model(
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    kernels: frozenset[str],
    progress: Progress,
) -> DraftModel | None:
    """The small model that drafts, if one does."""
    small = draft_model_id(config.draft)
    if small is None:
        return None
    progress("draft model", 0, 0)
    return load_draft_model(resolve_directory(small), getattr(torch, config.dtype), device, tokenizer, kernels)


def _choose_kernels(config: EngineConfig, threads: int) -> frozenset[str]:
    """The kernels that the configuration asks for, if this machine has any."""
    found = native() if config.kernels else None
    if not isinstance(found, Native):
        return frozenset()
    found.set_threads(threads)
    return frozenset(config.kernels)


def default_threads(shape: ExpertShape) -> int:
    """All cores, but one for small experts, where threads wait for each other longer than they compute."""
    if shape.numel < SMALL_EXPERT:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def _eos_ids(directory, skeleton: Skeleton, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a text, as transformers' generate would find them."""
    try:
        eos = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    except OSError:
        eos = None
    if eos is None:
        eos = skeleton.model.config.get_text_config().eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)


def _open_source(
    config: EngineConfig, table: ExpertTable, device: torch.device, progress: Progress, cancelled: Callable[[], bool]
) -> ExpertSource | HostSlab:
    """Where the link takes experts from: files, or all of them in main memory."""
    files = ExpertSource(table, direct=config.link.kind == "disk")
    if config.link.kind != "host":
        return files
    dtype = getattr(torch, config.dtype)
    with closing(files):
        need, free = slab_nbytes(table, dtype), available_bytes()
        if need > free:
            raise no_room(need, f"{free / 2**30:.1f} GiB are free")
        return HostSlab.load(
            files, dtype, device, lambda done, total: progress("experts to main memory", done, total), cancelled
        )


def _open_link(config: EngineConfig, source: ExpertSource | HostSlab, device: torch.device) -> Link:
    if isinstance(source, HostSlab):
        return HostLink(source, device)
    if config.link.kind == "disk":
        return DiskLink(source)
    gbps = config.link.gbps if config.link.gbps is not None else UNPACED_GBPS
    return EmulatedLink(source, gbps, config.link.latency_us)


def _draft_layers(skeleton: Skeleton, kernels: frozenset[str]) -> Callable[[int, int], DraftLayer]:
    """Makes the empty draft layer (MoE layer, bits): the kernels' where they know its activation."""

    def make(layer: int, bits: int) -> DraftLayer:
        activation = kernel_activation(skeleton.experts_modules[layer])
        if "draft" not in kernels or activation is None:
            return TorchDraftLayer(bits)
        return KernelDraftLayer(skeleton.table.experts, skeleton.table.shape, bits, activation)

    return make


def _quantize_all(
    source: ExpertSource | HostSlab,
    device: torch.device,
    kind: str,
    make: Callable[[int, int], DraftLayer],
    progress: Progress,
    cancelled: Callable[[], bool],
) -> list[DraftLayer]:
    """The draft's copy of every expert, made one expert at a time: the originals are never all in memory."""
    bits = self_draft_bits(kind)
    if bits is None:
        return []
    table, size = source.table, source.table.shape.nbytes
    raw = torch.empty(size, dtype=torch.uint8)
    total = table.layers * table.experts * size
    layers: list[DraftLayer] = []
    for layer in range(table.layers):
        layers.append(make(layer, bits))
        for expert in range(table.experts):
            if cancelled():
                raise Cancelled("loading was cancelled")
            source.read(layer, expert, 0, raw)
            layers[layer].put(expert, *table.shape.views(raw.view(table.shape.dtype).to(device)))
            progress(f"quantizing the draft to INT{bits}", (layer * table.experts + expert + 1) * size, total)
    return layers
