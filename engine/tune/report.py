"""What `tune` found, as plain JSON and as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.bench.table import format_columns
from engine.tune.prediction import Prediction
from engine.tune.probe import Probe
from engine.tune.search import finalists
from engine.tune.tuner import Ground, Tuned

#: Rows of the table.
SHOWN = 8
MICRO_BATCHES = (
    "Micro-batches: 1. One processor computes attention and experts alike, so a second one would have nothing to "
    "overlap with, and would read every weight again."
)


def report(tuned: Tuned) -> dict[str, Any]:
    """Everything; `chosen` is what a profile is loaded for."""
    ground, (prediction, played) = tuned.ground, tuned.winner
    config, setting = ground.config, prediction.setting
    measured = {id(p): probe for p, probe in tuned.played}
    shown = finalists(tuned.ranked, SHOWN)
    return {
        **ground.about,
        "memory_limit": ground.memory.limit,
        "memory_gbps": ground.memory_gbps,
        "fixed": dataclasses.asdict(tuned.fixed),
        "chosen": {
            "model": config.model,
            "dtype": config.dtype,
            "link": dataclasses.asdict(tuned.link),
            "draft": setting.draft,
            "k": setting.k,
            "batch": setting.batch,
            "prefetch": setting.prefetch,
            "cache_bytes": setting.slots * ground.memory.stored_bytes,
            "micro_batches": 1,
        },
        "rows": [_row(ground, p, measured.get(id(p))) for p in shown],
        "searched": len(tuned.ranked),
        "why": _why(tuned, prediction, played),
        "probes": [_probe(probe) for probe in tuned.probes],
        "fits": {" / ".join(key): family.to_json() for key, family in tuned.predictor.families.items()},
        "seconds": tuned.seconds,
    }


def _probe(probe: Probe) -> dict[str, Any]:
    fields = dataclasses.asdict(probe)
    del fields["lengths"]
    return {**fields, "tokens_per_s": probe.rate}


def _row(ground: Ground, prediction: Prediction, probe: Probe | None) -> dict[str, Any]:
    setting, memory = prediction.setting, ground.memory
    return {
        **dataclasses.asdict(setting),
        "predicted_tokens_per_s": prediction.rate,
        "measured_tokens_per_s": probe.rate if probe else None,
        "predicted_round_s": prediction.seconds,
        "measured_round_s": probe.seconds if probe else None,
        "tokens_per_round": prediction.tokens,
        "binds": prediction.iteration.reason,
        "draft_bytes": memory.draft_bytes(setting.draft),
        "cache_bytes": setting.slots * memory.slot_bytes,
        "kv_bytes": memory.kv_bytes(setting.batch),
    }


def _why(tuned: Tuned, prediction: Prediction, played: Probe) -> str:
    """One sentence."""
    others = [probe for _, probe in tuned.played if probe is not played]
    told = (
        f"{prediction.setting.name} won: {played.tokens:.2f} tokens in a round of {played.seconds * 1e3:.0f} ms, "
        f"{played.rate:.1f} tokens/s"
    )
    if others:
        next_one = max(others, key=lambda probe: probe.rate)
        told += f", {played.rate / next_one.rate:.2f} times the next ({next_one.setting.name})"
    return f"{told}; {prediction.iteration.reason}."


def format_tuned(found: dict[str, Any]) -> str:
    """For a terminal or a README."""
    cells = [["draft", "prefetch", "k", "batch", "tokens/s predicted", "measured", "tokens/round", "round ms",
              "draft MiB", "cache MiB", "slots", "KV MiB"]]  # fmt: skip
    for row in found["rows"]:
        played = row["measured_tokens_per_s"]
        cells.append([
            row["draft"], row["prefetch"], str(row["k"]), str(row["batch"]), f"{row['predicted_tokens_per_s']:.1f}",
            f"{played:.1f}" if played else "–", f"{row['tokens_per_round']:.2f}",
            f"{row['predicted_round_s'] * 1e3:.0f}",
            *(f"{row[part] / 2**20:.1f}" for part in ("draft_bytes", "cache_bytes")), str(row["slots"]),
            f"{row['kv_bytes'] / 2**20:.1f}",
        ])  # fmt: skip
    binds = [f"{row['draft']}, {row['prefetch']}, batch {row['batch']}: {row['binds']}" for row in found["rows"]]
    machine, chosen = found["machine"], found["chosen"]
    return "\n".join([
        f"{found['model']['name']} in {chosen['dtype']} on {machine['cpu']}; memory is read at "
        f"{found['memory_gbps']:.1f} GB/s; link: {found['link']['label']}",
        f"{found['memory_limit'] / 2**20:.1f} MiB for draft, cache and KV; {found['searched']} settings predicted from "
        f"{len(found['probes'])} that were run, in {found['seconds']:.0f} s",
        "",
        *format_columns(cells, left=2),
        "",
        *dict.fromkeys(binds),
        MICRO_BATCHES,
        "",
        found["why"],
    ])  # fmt: skip
