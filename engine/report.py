"""The facts of a run, as events and as plain JSON: what it ran on, what it held in memory, how it went."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from engine import events
from engine.config import KERNELS
from engine.control.governor import Choice
from engine.control.observation import Observation
from engine.control.presets import find_preset
from engine.kernels.native import Absent, native
from engine.offload.emulated import EmulatedLink
from engine.speculation.batch import Sequence

if TYPE_CHECKING:
    from engine.engine import Engine, Run

#: What `generate --json` tells of the expert cache: decoding only, the prefill is not counted.
EXPERT_COUNTS = (
    "requests", "hits", "late", "misses",
    "computed", "prefetched", "prefetch_used", "prefetch_late", "prefetch_wasted", "prefetch_cancelled", "bytes_loaded",
    "bytes_wasted",
)  # fmt: skip


def run_start(engine: Engine, run: Run) -> events.RunStart:
    """The event that tells what a run runs on."""
    return events.RunStart(
        t=0,
        schema=events.SCHEMA_VERSION,
        model=model_info(engine),
        machine=machine_info()
        | {
            "threads": engine.loaded.threads,
            "kernels": engine.kernels,
            "device": device_name(engine),
            "roofs": engine.roofs,
        },
        link=link_info(engine),
        config=config_info(engine, run),
        memory=memory_info(engine, run),
        slots_per_layer=engine.cache.slots_per_layer,
        prompts=[_prompt(engine.loaded.tokenizer, sequence.prompt_ids) for sequence in run.sequences],
        started_unix=run.recorder.started_unix,
    )


def cache_state(engine: Engine, run: Run) -> events.CacheState:
    """The expert cache now, with the counts since the last call."""
    seen = engine.cache.take_round()
    return events.CacheState(
        t=run.recorder.now(),
        round=run.round,
        slots_per_layer=engine.cache.slots_per_layer,
        resident=engine.cache.resident(),
        used=seen.used,
        evicted=seen.evicted,
        hits=seen.hits,
        late=seen.late,
        misses=seen.misses,
    )


def governor_choice(run: Run, choice: Choice) -> events.GovernorChoice:
    """The governor's choice for the round that begins."""
    return events.GovernorChoice(
        t=run.recorder.now(),
        round=run.round,
        k=choice.k,
        auto=choice.auto,
        probing=choice.probing,
        reason=choice.reason,
        expected_tokens=choice.expected_tokens,
        predicted_seconds=choice.seconds,
        predicted_rate=choice.rate,
        prefetch=choice.prefetch,
    )


def roofline_point(run: Run, seen: Observation, link_bytes_per_s: float) -> events.RooflinePoint:
    """Where the round that ended lies on the amortization roofline."""
    moved, waited = run.recorder.round_moved_bytes()
    return events.RooflinePoint(
        t=run.recorder.now(),
        round=run.round,
        k=seen.k,
        tokens=seen.tokens,
        seconds=seen.seconds,
        sync_bytes=waited,
        moved_bytes=moved,
        link_bytes_per_s=link_bytes_per_s,
        compute_tokens_per_s=seen.tokens / max(seen.seconds - seen.stall_seconds, 1e-9),
    )


def model_info(engine: Engine) -> dict[str, Any]:
    """What the page and the trace say about the model."""
    config, table = engine.loaded.runner.config, engine.loaded.source.table
    return {
        "name": engine.loaded.name,
        "architecture": type(engine.loaded.runner.model).__name__,
        "layers": config.num_hidden_layers,
        "moe_layers": table.layers,
        "experts": table.experts,
        "top_k": engine.top_k,
        "hidden": table.shape.hidden,
        "expert_bytes": table.shape.nbytes,
        "dtype": engine.config.dtype,
        "vocab": config.vocab_size,
    }


def machine_info() -> dict[str, Any]:
    """The machine in words. Memory is the physical one, or a container's limit where it is lower."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "device": "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def device_name(engine: Engine) -> str:
    """What computes."""
    device = engine.loaded.device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def kernels_label(asked: Collection[str], used: Collection[str]) -> str:
    """The kernels' variant, with the names of those in use if they are not all; or "torch", and why."""
    if not asked:
        return "torch (no kernels were asked for)"
    found = native()
    if isinstance(found, Absent):
        return f"torch ({found.reason})"
    names = [name for name in KERNELS if name in used]
    return found.variant if len(names) == len(KERNELS) else f"{found.variant} ({', '.join(names)})"


def link_info(engine: Engine) -> dict[str, Any]:
    """The link with its label; an emulated one always says so."""
    link, preset = engine.loaded.link, engine.config.link.preset
    label = link.label
    if preset is not None:
        machine = find_preset(preset)
        label += f", paced like {machine.label}: moving an expert takes as long as computing {machine.ratio:.1f} layers"
    emulated = isinstance(link, EmulatedLink)
    return {
        "kind": engine.config.link.kind,
        "label": label,
        "gbps": link.bytes_per_s / 1e9,
        "latency_us": link.latency_us if isinstance(link, EmulatedLink) else 0.0,
        "emulated": emulated,
        "preset": preset,
    }


def memory_info(engine: Engine, run: Run) -> dict[str, int]:
    """Bytes of the fast tier: weights that are not experts, what the drafter adds, cache slots, KV (as it will be)."""
    kv = run.batch.cache
    parts = {
        "shared": engine.loaded.skeleton.shared_bytes,
        "draft": run.drafter.nbytes,
        "cache": engine.cache.capacity_nbytes,
        "kv": engine.kv_bytes_per_token * kv.max_length * len(kv.lengths),
    }
    return {**parts, "total": sum(parts.values())}


def config_info(engine: Engine, run: Run) -> dict[str, Any]:
    """Every setting as it was resolved."""
    settings = {**dataclasses.asdict(engine.config), **dataclasses.asdict(run.options)}
    resolved = {
        "cache": engine.cache.slots_per_layer,
        "stop": list(run.options.stop),
        "kernels": list(engine.config.kernels),
        "link_label": engine.loaded.link.label,
    }
    return {**settings, **run.knobs.values, **resolved}


def summarize(engine: Engine, run: Run, sequence: Sequence) -> dict[str, Any]:
    """The object that `generate --json` prints for one sequence: its own text and times; the batch's rounds, experts,
    time split and memory. `decode_s` goes from when its prompt was read to its last token, `finished_s` from the
    run's start.
    """
    recorder, totals = run.recorder, run.recorder.totals
    transfer_ns, overlapped_ns = recorder.overlap()
    decode_s = max(sequence.last_at - sequence.joined_at, 0) / 1e9
    now, before = engine.cache.stats, run.prefill_stats
    experts = {name: getattr(now, name) - getattr(before, name) for name in EXPERT_COUNTS}
    # Those whose fate was decided while decoding: streaming goes on from the prefill without a break.
    experts["prefetched"] = sum(experts[f"prefetch_{fate}"] for fate in ("used", "late", "wasted", "cancelled"))
    return {
        "text": sequence.stream.text,
        "token_ids": sequence.new_ids,
        "prompt_tokens": len(sequence.prompt_ids),
        "new_tokens": len(sequence.new_ids),
        "finish_reason": sequence.finish_reason,
        "ttft_s": sequence.first_at / 1e9 if sequence.first_at is not None else None,
        "finished_s": sequence.last_at / 1e9,
        "decode_s": decode_s,
        "decode_tok_s": len(sequence.new_ids) / decode_s if decode_s else None,
        "rounds": totals.rounds,
        "acceptance_rate": _ratio(totals.accepted, totals.verified),
        "acceptance_by_position": [_ratio(a, n) for a, n in zip(totals.accepted_at, totals.verified_at, strict=True)],
        "mean_acceptance_length": 1 + totals.accepted / totals.drafting_rounds if totals.drafting_rounds else None,
        "experts": experts,
        "time": {
            "draft_s": totals.draft_ns / 1e9,
            "verify_s": totals.verify_ns / 1e9,
            "stall_s": totals.stall_ns / 1e9,
            "transfer_s": transfer_ns / 1e9,
            "overlapped_s": overlapped_ns / 1e9,
        },
        "overlap": _ratio(overlapped_ns, transfer_ns),
        "draft_alarm": run.draft_alarm,
        "memory": memory_info(engine, run),
        "config": config_info(engine, run),
    }


def batch_figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What all sequences of a run did together: `decode_s` from the first one's prompt to the last one's last token."""
    started = [result["finished_s"] - result["decode_s"] for result in results if result["new_tokens"]]
    finished = [result["finished_s"] for result in results if result["new_tokens"]]
    decode_s = max(finished, default=0.0) - min(started, default=0.0)
    tokens = sum(result["new_tokens"] for result in results)
    return {
        "sequences": len(results),
        "new_tokens": tokens,
        "decode_s": decode_s,
        "decode_tok_s": tokens / decode_s if decode_s else None,
    }


def _prompt(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[dict[str, Any]]:
    """A prompt token by token; special tokens have no text."""
    return [{"id": i, "text": str(tokenizer.decode([i], skip_special_tokens=True))} for i in ids]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(physical, int(file.read()))
    except (OSError, ValueError):
        return physical
