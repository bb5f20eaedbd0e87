"""The command: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.config import (
    BATCH_LIMIT,
    DTYPES,
    EMBEDDED_MODEL,
    K_LIMIT,
    LINKS,
    CacheBudget,
    EngineConfig,
    LinkConfig,
    parse_draft,
)
from engine.errors import UsageError

#: Seconds that the measurements may take, by default and at least.
SECONDS, LEAST_SECONDS = 90.0, 5.0


def add_tune(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """The command's options."""
    about = (
        "Measure short runs on this machine, predict all settings from them through the simulator, and play the best "
        "against each other. What you fix stays."
    )
    tune = commands.add_parser("tune", help="find the fastest draft, k, batch, prefetch and split of memory",
                               description=about, formatter_class=formatter)  # fmt: skip
    add = tune.add_argument
    add("--model", default=str(EMBEDDED_MODEL), metavar="PATH_OR_ID", help="a directory or a hub id")
    add("--dtype", choices=DTYPES, default="float32", help="what the model computes in")
    add("--link", type=LinkConfig.parse, default="disk", metavar="LINK", help=LINKS)
    add("--memory", default="50%", metavar="50%|600MiB",
        help="for draft, cache and KV together: a share of the experts' bytes, or bytes")  # fmt: skip
    add("--draft", default="auto", metavar="DRAFT|auto", help="who drafts, as in generate")
    add("--k", default="auto", metavar="N|auto", help=f"draft length, 0 to {K_LIMIT}")
    add("--batch", default="auto", metavar="N|auto", help=f"sequences at a time, 1 to {BATCH_LIMIT}; auto: up to 16")
    add("--prefetch", default="auto", metavar="none|draft|stream|auto", help="who says what to fetch ahead")
    add("--seconds", type=float, default=SECONDS, metavar="S", help="about how long to measure")
    add("--threads", type=int, metavar="N", help="CPU threads of torch")
    add("--out", type=Path, metavar="FILE", help="write a profile for generate --profile")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--debug", action="store_true", help="show the traceback of an error")
    tune.set_defaults(command=run_tune)


def run_tune(options: argparse.Namespace) -> int:
    """The command. Raises UsageError and BudgetError."""
    from engine.tune.space import Fixed

    budget = CacheBudget.parse(options.memory)
    if budget.slots is not None:
        raise UsageError(f"--memory {options.memory!r} is for draft, cache and KV: use a share (50%) or bytes (600MiB)")
    if not LEAST_SECONDS <= options.seconds <= 3600:
        raise UsageError(f"--seconds {options.seconds:g} is out of range: use {LEAST_SECONDS:g} to 3600")
    fixed = Fixed(
        draft=None if options.draft == "auto" else parse_draft(options.draft),
        k=_number("--k", options.k),
        batch=_number("--batch", options.batch),
        prefetch=None if options.prefetch == "auto" else options.prefetch,
    )
    config = EngineConfig(model=options.model, dtype=options.dtype, link=options.link, threads=options.threads)
    from engine.tune.profile import save_profile
    from engine.tune.report import format_tuned, report
    from engine.tune.tuner import tune  # after the checks: torch takes seconds to import

    found = report(tune(config, fixed, budget, options.seconds, lambda line: print(line, file=sys.stderr)))
    if options.out is not None:
        save_profile(options.out, found)
    print(json.dumps(found, ensure_ascii=False) if options.json else format_tuned(found))
    return 0


def _number(option: str, text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is neither a number nor auto") from None
