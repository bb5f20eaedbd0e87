"""The command: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.control.hardware_profile import HardwareProfile, load_hardware
from engine.control.model_profile import ModelProfile, load_model
from engine.control.operators import Workload
from engine.control.policies import batch_that_fits
from engine.control.routing import RecordedRouting, Routing, UniformRouting
from engine.errors import UsageError
from engine.simulate.reports import reproduce, simulate_policies
from engine.simulate.tables import format_policies, format_reproduction


def add_simulate(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """The command's options."""
    about = (
        "What policies would do with a published model on a published machine, as its roofs allow; or the figures of "
        "the papers beside what follows from their inputs (--reproduce)."
    )
    simulate = commands.add_parser("simulate", help="predict policies for any machine and model; the papers' tables",
                                   description=about, formatter_class=formatter)  # fmt: skip
    add = simulate.add_argument
    add("--reproduce", action="store_true", help="the papers' figures beside ours")
    add(
        "--hardware",
        default="a30",
        metavar="NAME|FILE",
        help="a profile of assets/profiles/hardware, or your own .json",
    )
    add("--model", default="mixtral-8x7b", metavar="NAME|FILE", help="of assets/profiles/models, or your own .json")
    add("--batch", default="1", metavar="N|max", help="sequences at once; max: as many as host memory holds")
    add("--k", type=int, default=4, metavar="N", help="draft length")
    add("--prompt-length", type=int, default=512, metavar="N", help="tokens a sequence starts with")
    add("--new-tokens", type=int, default=128, metavar="N", help="tokens it grows by")
    add("--acceptance", type=float, default=0.8, metavar="P", help="probability that a draft token is accepted")
    add(
        "--routing", default="uniform", metavar="uniform|FILE", help="at random, or as a run recorded it (--trace FILE)"
    )
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add("--debug", action="store_true", help="show the traceback of an error")
    simulate.set_defaults(command=run_simulate)


def run_simulate(options: argparse.Namespace) -> int:
    """The command. Raises UsageError and BudgetError."""
    if options.reproduce:
        report = reproduce()
        text = format_reproduction(report)
    else:
        hardware, model = load_hardware(options.hardware), load_model(options.model)
        work = Workload(1, options.k, options.prompt_length, options.new_tokens, options.acceptance)
        work = replace(work, batch=_batch(options.batch, hardware, model, work))
        report = simulate_policies(hardware, model, work, _routing(options.routing, model))
        text = format_policies(report)
    print(json.dumps(report, ensure_ascii=False) if options.json else text)
    return 0


def _batch(text: str, hardware: HardwareProfile, model: ModelProfile, work: Workload) -> int:
    if text == "max":
        return batch_that_fits(hardware, model, work)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--batch {text!r} is neither a number nor max") from None


def _routing(text: str, model: ModelProfile) -> Routing:
    """A recording counts for a model only if it has as many experts and takes as many of them a token."""
    if text == "uniform":
        return UniformRouting(model.experts, model.top_k)
    recorded = RecordedRouting.from_trace(Path(text))
    if recorded.top_k != model.top_k or recorded.highest >= model.experts:
        raise UsageError(
            f"{text} was recorded with {recorded.top_k} experts a token, up to number {recorded.highest}: "
            f"{model.label} takes {model.top_k} of {model.experts}"
        )
    return recorded
