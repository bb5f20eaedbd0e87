"""What each decision of the engine is worth, one changed at a time: `python -m engine bench --suite ablations`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from engine.bench.belady import RequestLog, belady_loads
from engine.bench.contenders import COLUMNS, Contender, contender_row, measure_all, pinned_link
from engine.bench.prompts import PROMPTS
from engine.bench.random_model import with_random_model
from engine.bench.table import at_most, format_bars, format_columns, format_neighbours
from engine.bench.wrong_ways import corrupted_predictions, separate_kv, timing
from engine.config import EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.machine import Neighbours
from engine.report import link_info, machine_info

#: All contenders draft so many tokens: k is not what is compared.
DRAFT_LENGTH = 8
AS_IT_IS = "as it is: adaptive, lookahead, shared KV, INT4"
NO_PREFETCH = "prefetch: none"
SEPARATE_KV = "KV: the draft's own"
#: Policies, compared without prefetches.
EVICTION = {"lookahead": NO_PREFETCH, "lfu": "eviction: lfu, prefetch none", "lru": "eviction: lru, prefetch none"}
BOUND = "offline Belady"
Around = Callable[[Engine], AbstractContextManager[Any]]


def ablations_suite(
    config: EngineConfig, max_new_tokens: int, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Prefetch timing, eviction, shared KV, the draft's bits, and wrong predictions, at batch 1 and temperature 0.

    `ratio` is to the engine as it is. The cache has the same size in every row; what a row needs besides shows in
    its memory. `eviction` counts loads of whole runs, prefill and all, and the least that any policy could do with.
    """
    config = with_random_model(config, say)
    neighbours = Neighbours()
    engine = Engine.load(dataclasses.replace(config, draft="none"))
    try:
        config, link, slots = pinned_link(engine), link_info(engine), engine.cache.total_slots
    finally:
        engine.close()
    logs = {name: RequestLog() for name in EVICTION.values()}
    contenders = _contenders(config, logs)
    results = measure_all(contenders, GenerationConfig(max_new_tokens=max_new_tokens), repeats, say)
    return {
        "suite": "ablations",
        "machine": machine_info() | {"others_cpu_share": neighbours.share()},
        "model": config.model,
        "dtype": config.dtype,
        "link": link,
        "k": DRAFT_LENGTH,
        "prompts": len(PROMPTS),
        "repeats": repeats,
        "rows": _rows(contenders, results),
        "eviction": _eviction(results, logs, slots),
        "bars": [at_most("different outputs at temperature 0", _different(results), 0)],
    }


def _contenders(config: EngineConfig, logs: dict[str, RequestLog]) -> list[Contender]:
    """Those that need another draft come last: the others share one engine."""

    def variant(name: str, around: Around = nullcontext, **changes: Any) -> Contender:
        settings = {"draft": "self-int4", "policy": "lookahead", "prefetch": "draft", **changes}
        return Contender(name, dataclasses.replace(config, **settings), DRAFT_LENGTH, around=around)

    return [
        variant(AS_IT_IS),
        variant(NO_PREFETCH, logs[NO_PREFETCH].listen, prefetch="none"),
        *(variant(f"prefetch: {name}", partial(timing, name=name)) for name in ("early", "late")),
        variant("prefetch: next layer", prefetch="next-layer"),
        *(
            variant(name, logs[name].listen, prefetch="none", policy=policy)
            for policy, name in EVICTION.items()
            if name != NO_PREFETCH
        ),
        variant(SEPARATE_KV, separate_kv),
        *(
            variant(f"predictions corrupted: {share:.0%}", partial(corrupted_predictions, share=share))
            for share in (0.25, 0.5, 0.75)
        ),
        *(variant(f"draft: INT{bits}", draft=f"self-int{bits}") for bits in (8, 3, 2)),
    ]  # fmt: skip


def _rows(contenders: list[Contender], results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    base = contender_row(contenders[0], results[AS_IT_IS], None)
    rows = [contender_row(contender, results[contender.name], base) for contender in contenders]
    for row in rows:
        if row["name"] == SEPARATE_KV:
            # Once more the KV that the engine counts: the draft's is as large as the target's.
            row["memory_total"] += results[SEPARATE_KV][0]["memory"]["kv"]
    return rows


def _eviction(
    results: dict[str, list[dict[str, Any]]], logs: dict[str, RequestLog], slots: int
) -> list[dict[str, Any]]:
    """One row a policy, the bound first. All of them answered the same requests."""
    requests = logs[NO_PREFETCH].requests
    # The first prompt ran once more, to warm up; at temperature 0 it gave as many tokens.
    runs = results[NO_PREFETCH]
    tokens = sum(run["new_tokens"] for run in runs) + len(runs) // len(PROMPTS) * runs[0]["new_tokens"]
    bound = belady_loads(requests, slots) / tokens
    asked = sum(len(experts) for _, experts in requests) / tokens
    rows = [{"policy": BOUND, "loads_per_token": bound, "over_bound": 1.0}]
    for policy, name in EVICTION.items():
        loads = logs[name].misses / tokens
        rows.append({"policy": policy, "loads_per_token": loads, "over_bound": loads / bound})
    return [row | {"requests_per_token": asked} for row in rows]


def _different(results: dict[str, list[dict[str, Any]]]) -> int:
    """How many texts there are beyond one: no decision may change what is said."""
    return len({tuple(tuple(result["token_ids"]) for result in runs) for runs in results.values()}) - 1


def format_ablations(report: dict[str, Any]) -> str:
    """A report as text, for a terminal or a README."""
    cells = [list(COLUMNS), *([show(row) for show in COLUMNS.values()] for row in report["rows"])]
    loads = [["eviction, no prefetch", "loads/token", "× Belady"]]
    loads += [
        [row["policy"], f"{row['loads_per_token']:.2f}", f"{row['over_bound']:.2f}"] for row in report["eviction"]
    ]
    machine = report["machine"]
    return "\n".join([
        f"ablations on {machine['cpu']}, {report['dtype']}, k = {report['k']}; link: {report['link']['label']}",
        "",
        *format_columns(cells),
        "",
        *format_columns(loads),
        "",
        *format_bars(report["bars"]),
        *format_neighbours(machine),
    ])  # fmt: skip
