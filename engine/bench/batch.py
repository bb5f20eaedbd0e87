"""Many sequences at a time on offloaded experts: `python -m engine bench --suite batch` (SpecMoEOff)."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from engine.bench.batch_run import BatchRun, batch_row, format_batch_rows, run_batch
from engine.bench.contenders import Contender, same_link
from engine.bench.memory_split import split_memory
from engine.bench.prompts import many_prompts
from engine.bench.random_model import with_random_model
from engine.bench.table import at_least, at_most, format_bars, format_columns, format_neighbours
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.native import Native, native
from engine.machine import Neighbours
from engine.report import machine_info

Say = Callable[[str], None]

OURS = "speculation"
PLAIN = "without speculation"
ALONE = "one prompt at a time"
#: Draft and cache together get this share of the experts' bytes.
LIMIT = 0.5
#: What the trial tries: the resident experts, which take no memory, and the copy that is accepted most often.
TRIAL_DRAFTS = ("sparse-1", "sparse", "self-int4")
TRIAL_K = (5, 7, 10)
TRIAL_TOKENS = 32
#: A longer draft that is slower than this share of a shorter one is not made longer still.
SLOWER = 0.9
#: How many prompts run one at a time: each is a sample of the same rate, and all of them would take minutes.
ALONE_PROMPTS = 4


def batch_suite(config: EngineConfig, batch: int, max_new_tokens: int, repeats: int, say: Say) -> dict[str, Any]:
    """Speculation for a whole batch, against the same engine without it, and against one prompt at a time.

    Draft and cache together hold LIMIT of the experts' bytes: who has no draft has more slots. Layers stream through
    the cache in all batches, so that the link never waits for a request. Which draft and k, a trial decides; one
    prompt at a time runs ALONE_PROMPTS of them, with speculation or without, as the trial found faster.
    """
    config = with_random_model(config, say)
    neighbours = Neighbours()
    prompts = many_prompts(batch)
    config, link = same_link(config)
    drafts = [(draft, k) for draft in TRIAL_DRAFTS for k in TRIAL_K]
    trials = _try_drafts(config, prompts, drafts, OURS, say)
    ours = _best(trials)
    alone = _try_drafts(config, prompts[:1], [(None, 0), ours], ALONE, say)
    contenders = [
        _contender(config, PLAIN, None, 0),
        _contender(config, OURS, *ours),
        _contender(config, ALONE, *_best(alone)),
    ]
    runs: dict[str, list[BatchRun]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders:
            say(f"run {repeat + 1} of {repeats}: {contender.name}")
            runs[contender.name] += _measure(contender, prompts, max_new_tokens)
    rows = [batch_row(contender, runs[contender.name], runs[PLAIN]) for contender in contenders]
    return {
        "suite": "batch",
        "machine": machine_info() | {"others_cpu_share": neighbours.share()},
        "model": config.model,
        "dtype": config.dtype,
        "link": link,
        "limit": LIMIT,
        "batch": batch,
        "new_tokens": max_new_tokens,
        "repeats": repeats,
        "trials": trials + alone,
        "rows": rows,
        "bars": _bars(config, runs, rows),
    }


def _contender(config: EngineConfig, name: str, draft: str | None, k: int) -> Contender:
    """With `draft` and the slots that it leaves; in a batch layers stream, for one prompt the governor decides."""
    split = split_memory(config, draft or "none", LIMIT)
    prefetch = "auto" if name == ALONE else "stream"
    config = dataclasses.replace(
        config, draft=draft or "none", policy="lookahead", prefetch=prefetch, cache=split.budget
    )
    return Contender(name, config, k)


def _try_drafts(
    config: EngineConfig, prompts: list[str], settings: Iterable[tuple[str | None, int]], name: str, say: Say
) -> list[dict[str, Any]]:
    """Short runs with each (draft, k) that leaves room for a cache; of one draft, until a longer k is slower."""
    trials: list[dict[str, Any]] = []
    for draft, group in itertools.groupby(settings, key=lambda setting: setting[0]):
        split = split_memory(config, draft or "none", LIMIT)
        if split.slots < split.layers:
            continue
        contenders = [_contender(config, name, draft, k) for _, k in group]
        engine = Engine.load(contenders[0].config)
        try:
            for contender in contenders:
                trials.append(_trial(draft, contender.k, run_batch(engine, contender, prompts, TRIAL_TOKENS)))
                rate = trials[-1]["tokens_per_s"]
                say(f"trial: {name}, {draft or 'no draft'}, k = {contender.k}: {rate:.1f} tokens/s")
                if rate < SLOWER * max(trial["tokens_per_s"] for trial in trials if trial["draft"] == draft):
                    break
        finally:
            engine.close()
            del engine
            gc.collect()
    return trials


def _trial(draft: str | None, k: int | str, run: BatchRun) -> dict[str, Any]:
    return {
        "batch": run.sequences,
        "draft": draft,
        "k": k,
        "slots": run.slots,
        "tokens_per_s": run.full_rate,
        "mean_acceptance_length": run.mean_acceptance_length,
    }


def _best(trials: list[dict[str, Any]]) -> tuple[str | None, int]:
    best = max(trials, key=lambda trial: trial["tokens_per_s"])
    return best["draft"], best["k"]


def _measure(contender: Contender, prompts: list[str], max_new_tokens: int) -> list[BatchRun]:
    """The whole batch at once, or ALONE_PROMPTS of them one after the other."""
    engine = Engine.load(contender.config)
    try:
        groups = [[prompt] for prompt in prompts[:ALONE_PROMPTS]] if contender.name == ALONE else [prompts]
        return [run_batch(engine, contender, group, max_new_tokens) for group in groups]
    finally:
        engine.close()
        del engine
        gc.collect()


def _bars(config: EngineConfig, runs: dict[str, list[BatchRun]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the issue asks for, and what makes the comparison fair."""
    plain, ours, alone = rows
    bars = [
        at_least(f"times {PLAIN}, all {ours['batch']} decoding", ours["full_ratio"], 2.5),
        at_least(f"times {PLAIN}, whole run", ours["ratio"], 2.5),
        at_least(f"times {ALONE}, whole run", ours["tokens_per_s"] / alone["tokens_per_s"], 4.0),
    ]
    bars += [
        at_least(f"link busy, share of the wall, {row['name']}", row["link_busy"], 0.9)
        for row in rows
        if row["binds"] == "link" and row["name"] != ALONE
    ]
    split = split_memory(config, "none", LIMIT)
    held = max(row["draft_and_cache"] for row in rows)
    bars.append(at_most("draft and cache, share of the experts' bytes", held / split.expert_bytes, LIMIT))
    if isinstance(native(), Native) or config.dtype == "float32":
        # In bfloat16 only the kernels promise that.
        texts = [run.texts for name in runs for run in runs[name] if name != ALONE]
        different = sum(one != texts[0] for one in texts)
        different += sum(texts[0][i % ALONE_PROMPTS] != run.texts[0] for i, run in enumerate(runs[ALONE]))
        bars.append(at_most("different outputs at temperature 0", different, 0))
    return bars


def format_batch(report: dict[str, Any]) -> str:
    """A report as text, for a terminal or a README."""
    machine = report["machine"]
    cells = [["trial", "batch", "k", "cache slots", "tokens/s", "tokens/round"]]
    cells += [
        [t["draft"] or "none", str(t["batch"]), str(t["k"]), str(t["slots"]), f"{t['tokens_per_s']:.1f}",
         f"{t['mean_acceptance_length'] or 1:.2f}"]
        for t in report["trials"]
    ]  # fmt: skip
    return "\n".join([
        f"batch of {report['batch']} on {machine['cpu']}, {report['dtype']}; link: {report['link']['label']}",
        f"draft and cache hold {report['limit']:.0%} of the experts' bytes; "
        f"{ALONE}: {min(ALONE_PROMPTS, report['batch'])} of the {report['batch']} prompts",
        "",
        *format_columns(cells),
        "",
        *format_batch_rows(report["rows"]),
        "",
        *format_bars(report["bars"]),
        *format_neighbours(machine),
    ])  # fmt: skip
