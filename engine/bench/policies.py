"""Offloaded decoding against its rivals with a limit on fast memory: `python -m engine bench --suite policies`."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

from engine.bench.contenders import Contender, contender_row, format_rows, measure_all, same_link
from engine.bench.memory_split import Split, split_memory
from engine.bench.prompts import PROMPTS
from engine.bench.random_model import with_random_model
from engine.bench.table import at_least, at_most, format_bars, format_columns, format_neighbours
from engine.bench.transformers_decode import Outcome, run_disk_offload
from engine.config import DRAFTS, K_LIMIT, CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.kernels.native import Native, native
from engine.machine import Neighbours
from engine.report import machine_info
from engine.speculation.drafters import self_draft_bits, sparse_experts

OURS = "speculation and prefetch"
SAME_CACHE = "(a) on-demand LRU, k = 0, same cache"
SAME_MEMORY = "(b) on-demand LRU, k = 0, same memory"
NO_PREFETCH = "(c) speculation, no prefetch"
NEXT_LAYER = "(d) speculation, next-layer prefetch"
TRANSFORMERS = "(e) transformers, accelerate on disk"
#: Draft and cache together get this share of the experts' bytes.
LIMIT = 0.5
#: What the trial tries, with each draft that leaves room for a cache, until longer is slower.
TRIAL_K = (4, 6, 8, K_LIMIT)
TRIAL_TOKENS = 40
#: A draft that is slower than this share of the best so far is not tried with another k.
HOPELESS = 0.6


def policies_suite(
    config: EngineConfig, max_new_tokens: int, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Ours against on-demand caches, speculation with other prefetches, and accelerate, at batch 1 and temperature 0.

    Draft and cache together hold LIMIT of the experts' bytes. Which draft, and how long, a trial decides: more bits
    are accepted more often and leave fewer slots. All contenders run in turn in one process.
    """
    config = with_random_model(config, say)
    neighbours = Neighbours()
    config, link = same_link(config)
    trials = try_drafts(config, say)
    chosen = max(trials, key=lambda trial: trial["tokens_per_s"])
    contenders = _contenders(config, chosen)
    results = measure_all(contenders, GenerationConfig(max_new_tokens=max_new_tokens), repeats, say)
    offloaded = Outcome()
    # Once: it takes longer than all others together, and is further away than any disk's moods.
    say(f"run 1 of 1: {TRANSFORMERS}")
    run_disk_offload(config, max_new_tokens, offloaded)
    gc.collect()
    base = contender_row(contenders[0], results[SAME_CACHE], None)
    rows = [contender_row(contender, results[contender.name], base) for contender in contenders]
    rows.append(_offload_row(offloaded, base))
    return {
        "suite": "policies",
        "machine": machine_info() | {"others_cpu_share": neighbours.share()},
        "model": config.model,
        "dtype": config.dtype,
        "link": link,
        "limit": LIMIT,
        "prompts": len(PROMPTS),
        "repeats": repeats,
        "trials": trials,
        "chosen": {name: chosen[name] for name in ("draft", "k", "slots")},
        "rows": rows,
        "bars": _bars(results, rows, split_memory(config, chosen["draft"], LIMIT)),
    }


def try_drafts(config: EngineConfig, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A short run over one prompt for each draft by the target itself that leaves room for a cache, with some k.

    `slots` is how many experts the cache holds, of all layers together.
    """
    trials: list[dict[str, Any]] = []
    for draft in DRAFTS:
        split = split_memory(config, draft, LIMIT)
        if (self_draft_bits(draft) or sparse_experts(draft)) is None or split.slots < split.layers:
            continue
        engine = Engine.load(_ours(config, draft, split))
        rate = 0.0
        try:
            for k in TRIAL_K:
                options = GenerationConfig(max_new_tokens=TRIAL_TOKENS, k=k)
                result = engine.generate([PROMPTS[0]], options)[0]
                trials.append({
                    "draft": draft,
                    "k": k,
                    "slots": split.slots,
                    "tokens_per_s": result["decode_tok_s"],
                    "tokens_per_round": result["new_tokens"] / result["rounds"],
                })  # fmt: skip
                say(f"trial: {draft}, k = {k}: {result['decode_tok_s']:.2f} tokens/s")
                slower, rate = result["decode_tok_s"] < rate, result["decode_tok_s"]
                if slower or rate < HOPELESS * max(trial["tokens_per_s"] for trial in trials):
                    break
        finally:
            engine.close()
            del engine
            gc.collect()
    return trials


def _ours(config: EngineConfig, draft: str, split: Split, prefetch: str = "draft") -> EngineConfig:
    return dataclasses.replace(config, draft=draft, policy="lookahead", prefetch=prefetch, cache=split.budget)


def _contenders(config: EngineConfig, chosen: dict[str, Any]) -> list[Contender]:
    draft, k = chosen["draft"], chosen["k"]
    split = split_memory(config, draft, LIMIT)

    def on_demand(slots: int) -> EngineConfig:
        budget = CacheBudget(nbytes=slots * split.stored_bytes)
        return dataclasses.replace(config, draft="none", policy="lru", prefetch="none", cache=budget)

    return [
        Contender(SAME_CACHE, on_demand(split.slots), 0),
        Contender(SAME_MEMORY, on_demand(split.limit_slots), 0),
        Contender(NO_PREFETCH, _ours(config, draft, split, "none"), k),
        Contender(NEXT_LAYER, _ours(config, draft, split, "next-layer"), k),
        Contender(OURS, _ours(config, draft, split), k),
    ]


def _offload_row(outcome: Outcome, base: dict[str, Any]) -> dict[str, Any]:
    """What can be told of transformers: its speed. It reads all experts of a layer for each pass."""
    assert outcome.rate is not None
    row: dict[str, Any] = dict.fromkeys(base)
    return row | {
        "name": TRANSFORMERS,
        "equal_memory": False,
        "tokens_per_s": outcome.rate,
        "ratio": outcome.rate / base["tokens_per_s"],
        "tokens_per_round": 1.0,
    }


def _bars(results: dict[str, list[dict[str, Any]]], rows: list[dict[str, Any]], split: Split) -> list[dict[str, Any]]:
    """What the issue asks for, and what makes the comparison fair."""
    by_name = {row["name"]: row for row in rows}
    ours = by_name[OURS]

    def times(name: str, bar: float) -> dict[str, Any]:
        return at_least(f"times {name}", ours["tokens_per_s"] / by_name[name]["tokens_per_s"], bar)

    held = max(result["memory"]["draft"] + result["memory"]["cache"] for result in results[OURS])
    bars = [
        times(SAME_CACHE, 2.0),
        times(SAME_MEMORY, 1.3),
        times(TRANSFORMERS, 10.0),
        at_most("stall, share of the wall", ours["stall_share"], 0.20),
        at_most("bytes wasted, share of those moved", ours["wasted_share"], 0.15),
        at_most("draft and cache, share of the experts' bytes", held / split.expert_bytes, LIMIT),
    ]
    if isinstance(native(), Native) or results[OURS][0]["config"]["dtype"] == "float32":
        # In bfloat16 only the kernels promise that.
        texts = {tuple(tuple(result["token_ids"]) for result in runs) for runs in results.values()}
        bars.append(at_most("different outputs at temperature 0", len(texts) - 1, 0))
    return bars


def format_policies(report: dict[str, Any]) -> str:
    """A report as text, for a terminal or a README."""
    machine, chosen = report["machine"], report["chosen"]
    cells = [["trial", "k", "cache slots", "tokens/s", "tokens/round"]]
    cells += [
        [t["draft"], str(t["k"]), str(t["slots"]), f"{t['tokens_per_s']:.2f}", f"{t['tokens_per_round']:.2f}"]
        for t in report["trials"]
    ]
    return "\n".join([
        f"policies on {machine['cpu']}, {report['dtype']}; link: {report['link']['label']}",
        f"draft and cache hold {report['limit']:.0%} of the experts' bytes",
        "",
        *format_columns(cells),
        f"chosen: {chosen['draft']}, k = {chosen['k']}",
        "",
        *format_rows(report["rows"]),
        "",
        *format_bars(report["bars"]),
        *format_neighbours(machine),
    ])  # fmt: skip
