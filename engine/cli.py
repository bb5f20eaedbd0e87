"""The command line: `python -m engine generate | bench | simulate | tune | serve | upcycle | doctor`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from engine.config import (
    DTYPES,
    EMBEDDED_MODEL,
    LINKS,
    MISSES,
    POLICIES,
    PREFETCH_SOURCES,
    UPCYCLING_TEXT,
    CacheBudget,
    EngineConfig,
    GenerationConfig,
    LinkConfig,
    parse_draft,
    parse_kernels,
)
from engine.console import Console, batch_line, one_line_of
from engine.errors import EngineError, UsageError, one_line
from engine.events import Event
from engine.progress import Pace, describe
from engine.requests import Request, read_requests, read_text
from engine.serve.command import add_serve
from engine.simulate.command import add_simulate
from engine.trace_file import TraceFile
from engine.tune.command import add_tune
from engine.tune.profile import load_profile

DRAFT_HELP = (
    "who drafts: self-int8, self-int4, self-int3 or self-int2 (a quantized copy of the model's experts), sparse or "
    "sparse-1 (the resident experts: two or one a token, no extra memory), ngram (repeats what the text said before), "
    "model:PATH_OR_ID (a small model with the same vocabulary), none"
)

#: The link of benches, unless one is chosen: paced like the machine of MoE-SpeQ's evaluation.
BENCH_LINK = "emulated:phi3.5-a100"
CLEAR_LINE = "\r\x1b[K"


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    # Set before transformers is imported: a command line shows one message, not a library's log.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        options = _parser().parse_args(arguments)
        if getattr(options, "profile", None) is not None:
            options = _parser(load_profile(options.profile).options()).parse_args(arguments)
        return options.command(options)
    except EngineError as error:
        if "--debug" in arguments:
            raise
        _tell_error(str(error))
        return error.exit_status
    except BrokenPipeError:
        # The reader left (`| head`): what it wanted it has. Point stdout elsewhere so that exit does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _tell_error("interrupted")
        return 130
    except Exception as error:
        if "--debug" in arguments:
            raise
        _tell_error(f"{one_line(error)} (--debug shows where)")
        return 1


def _tell_error(text: str) -> None:
    # A line of progress may stand there.
    print(f"{CLEAR_LINE if sys.stderr.isatty() else ''}error: {text}", file=sys.stderr)


def _parser(profile: dict[str, Any] | None = None) -> argparse.ArgumentParser:
    """With `profile`, those are the defaults of generate: what is on the command line wins."""
    parser = _Parser(prog="python -m engine", description="Speculative decoding on offloaded MoE models.")
    commands = parser.add_subparsers(
        dest="name", required=True, metavar="generate|bench|simulate|tune|serve|upcycle|doctor"
    )
    generate = commands.add_parser("generate", help="generate text", formatter_class=_Formatter)
    _add_engine_options(generate)
    _add_generation_options(generate)
    generate.add_argument("--trace", metavar="FILE", help="write the run's events to FILE, one JSON object a line")
    generate.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    generate.add_argument("--debug", action="store_true", help="show the traceback of an error")
    generate.add_argument("--profile", type=Path, metavar="FILE",
                          help="settings as tune wrote them; what is given here wins")  # fmt: skip
    generate.set_defaults(command=_generate, **(profile or {}))
    _add_bench(commands)
    add_simulate(commands, _Formatter)
    add_tune(commands, _Formatter)
    add_serve(commands, _Formatter)
    _add_upcycle(commands)
    _add_doctor(commands)
    return parser


def _add_bench(commands: Any) -> None:
    about = (
        "Measure contenders, all in one run. Besides a path or hub id, --model takes random-8x135m: a Mixtral of "
        "692 M random weights, written to the cache directory on first use (1.4 GB, and as much for its pack)."
    )
    bench = commands.add_parser("bench", help="compare contenders", description=about, formatter_class=_Formatter)
    _add_engine_options(bench)
    bench.add_argument("--suite", choices=("decode", "kernels", "policies", "ablations", "governor", "batch", "tune"),
                       required=True,
                       help="decode: speculation at equal memory, and what the kernels add; kernels: the compiled "
                            "kernels against torch and the machine's read bandwidth (needs no model); policies: "
                            "prefetching against its rivals, with half of the experts' bytes; ablations: what each "
                            "decision is worth; governor: auto against all fixed k and prefetch, on the embedded "
                            "model and --model; batch: speculation for a whole batch, against the same engine "
                            "without it, and one prompt at a time; tune: its predictions "
                            "against runs, and its choice against a sweep")  # fmt: skip
    bench.add_argument("--tables", choices=("memory", "kernels", "both"), default="both",
                       help="of decode: offloaded at equal memory; all resident, kernels on and off")  # fmt: skip
    bench.add_argument("--batch", type=int, default=16, metavar="N", help="of batch: prompts at a time")
    bench.add_argument("--workloads", default="", metavar="TEXT", help="of governor: those with TEXT in their name")
    bench.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of tune: how long it may measure")
    bench.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="tokens a prompt")
    bench.add_argument("--repeats", type=int, metavar="N",
                       help="runs of each contender, in turn (default: 1 to 5, by suite)")  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    bench.add_argument("--debug", action="store_true", help="show the traceback of an error")
    bench.set_defaults(command=_bench, link=LinkConfig.parse(BENCH_LINK))


def _add_upcycle(commands: Any) -> None:
    about = (
        "Make a Mixtral of a small dense Llama, with no training: experts are copies of its feed-forward networks "
        "with a little noise, routers are clusters of its hidden states."
    )
    upcycle = commands.add_parser("upcycle", help="make a Mixture-of-Experts of a small dense model",
                                  description=about, formatter_class=_Formatter)  # fmt: skip
    add = upcycle.add_argument
    add("--base", required=True, metavar="DIR_OR_ID_OR_GGUF",
        help="the dense model: a directory, a hub id, or a .gguf file (pip install gguf)")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory for the result")
    add("--experts", type=int, default=8, metavar="N", help="experts a layer")
    add("--top-k", type=int, default=2, metavar="N", help="experts that a token is routed to")
    add("--noise", type=float, default=0.06, metavar="X", help="how far experts differ, as a share of their weights")
    add("--text", type=Path, default=UPCYCLING_TEXT, metavar="FILE", help="what the routers are made for")
    add("--seed", type=int, default=0, metavar="S", help="the same seed gives the same model")
    add("--json", action="store_true", help="print one JSON object")
    add("--debug", action="store_true", help="show the traceback of an error")
    upcycle.set_defaults(command=_upcycle)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="what this machine and installation can do; builds the kernels",
                                 formatter_class=_Formatter)  # fmt: skip
    doctor.add_argument("--model", metavar="PATH_OR_ID", help="tell the fast memory that this model would take, too")
    doctor.add_argument("--draft", type=parse_draft, default="self-int4", metavar="DRAFT", help="who drafts")
    doctor.add_argument("--cache", type=_cache, default="25%", metavar="25%|64MiB|N", help="share, bytes or slots")
    doctor.add_argument("--dtype", choices=DTYPES, default="float32", help="what the model computes in")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument("--debug", action="store_true", help="show the traceback of an error")
    doctor.set_defaults(command=_doctor)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not "None"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=str(EMBEDDED_MODEL), metavar="PATH_OR_ID", help="a directory or a hub id")
    add("--draft", type=parse_draft, default="self-int4", metavar="DRAFT", help=DRAFT_HELP)
    add("--policy", choices=POLICIES, default="lookahead", help="which expert is evicted")
    add("--prefetch", choices=PREFETCH_SOURCES, default="auto", help="who says what to fetch ahead")
    add("--cache", type=_cache, default="25%", metavar="25%|64MiB|N", help="share, bytes or slots a layer")
    add("--link", type=LinkConfig.parse, default="disk", metavar="LINK", help=LINKS)
    add("--device", default="auto", metavar="auto|cpu|cuda[:N]", help="what computes; CUDA needs --link host")
    add("--misses", choices=MISSES, default="auto",
        help="fetch a missed expert, or compute it where it lies (--link host), or what costs less")  # fmt: skip
    add("--dtype", choices=DTYPES, default="float32", help="what the model computes in")
    add("--threads", type=int, metavar="N", help="CPU threads of torch")
    add("--kernels", type=parse_kernels, default="all", metavar="all|none|NAME,…",
        help="what the compiled kernels compute: attention,linear,experts,draft")  # fmt: skip
    add("--no-pack", action="store_true", help="read byte ranges of the shards instead of the page-aligned pack")


def _add_generation_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="F",
                        help="a file of texts to continue: one a line, or objects with prompt and max_new_tokens, one "
                             "a line of a .jsonl file")  # fmt: skip
    add("--batch", type=int, default=32, metavar="N", help="prompts at a time; the others wait for one to finish")
    add("--chat", action="store_true", help="the prompt is a message to answer, in the model's chat template")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="where to stop at the latest")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    add("--top-k", type=int, default=0, metavar="N", help="keep the N likeliest tokens; 0 keeps all")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens of total probability P")
    add("--seed", type=int, default=0, metavar="S", help="the same seed and settings give the same text")
    add("--stop", nargs="+", default=[], metavar="STR", help="end at any of these strings")
    add("--k", type=_draft_length, default="auto", metavar="N|auto", help="draft length")
    add("--k-max", type=int, default=8, metavar="N", help="the longest draft that auto may choose")


def _cache(text: str) -> CacheBudget:
    return CacheBudget.parse(text)


def _draft_length(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--k {text!r} is neither a number nor auto") from None


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    fields: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "draft": options.draft,
        "policy": options.policy,
        "prefetch": options.prefetch,
        "cache": options.cache,
        "link": options.link,
        "pack": not options.no_pack,
        "kernels": options.kernels,
        "device": options.device,
        "misses": options.misses,
    }
    if options.threads is not None:
        fields["threads"] = options.threads
    return EngineConfig(**fields)


def _generate(options: argparse.Namespace) -> int:
    config = _engine_config(options)
    request = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tuple(options.stop),
        k=options.k,
        k_max=options.k_max,
        chat=options.chat,
        batch=options.batch,
    )
    prompts = [Request(options.prompt)] if options.prompt is not None else read_requests(options.prompt_file)
    from engine.engine import Engine  # after the checks: torch takes seconds to import
    from engine.report import batch_figures

    engine = Engine.load(config, progress=_progress_line(sys.stderr))
    screen = None if options.json else Console(sys.stdout, len(prompts))
    try:
        with TraceFile(options.trace) as trace:
            results = engine.generate(prompts, request, emit=_emitter(screen, trace))
    finally:
        engine.close()
    batch = batch_figures(results)
    if options.json:
        print(json.dumps(results[0] if len(results) == 1 else {"results": results, "batch": batch}, ensure_ascii=False))
    else:
        print(one_line_of(results[0]) if len(results) == 1 else batch_line(batch, results[0]), file=sys.stderr)
    return 0


def _bench(options: argparse.Namespace) -> int:
    if options.repeats is not None and options.repeats < 1:
        raise UsageError("--repeats must be at least 1")
    if options.batch < 2:
        raise UsageError("--batch must be at least 2")
    config = _engine_config(options)

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    if options.suite == "kernels":
        from engine.bench.kernels import Sizes, format_kernels, kernels_suite

        sizes = Sizes() if options.repeats is None else Sizes(repeats=options.repeats)
        report = kernels_suite(sizes, options.threads, say)
        text = format_kernels(report)
    elif options.suite == "policies":
        from engine.bench.policies import format_policies, policies_suite

        report = policies_suite(config, options.max_new_tokens, options.repeats or 1, say)
        text = format_policies(report)
    elif options.suite == "ablations":
        from engine.bench.ablations import ablations_suite, format_ablations

        report = ablations_suite(config, options.max_new_tokens, options.repeats or 1, say)
        text = format_ablations(report)
    elif options.suite == "batch":
        from engine.bench.batch import batch_suite, format_batch

        report = batch_suite(config, options.batch, options.max_new_tokens, options.repeats or 1, say)
        text = format_batch(report)
    elif options.suite == "tune":
        from engine.bench.tuning import format_tuning, tuning_suite

        report = tuning_suite(config, options.seconds, say)
        text = format_tuning(report)
    elif options.suite == "governor":
        from engine.bench.governor import format_governor, governor_suite

        report = governor_suite(config, options.max_new_tokens, options.repeats or 2, say, options.workloads)
        text = format_governor(report)
    else:
        from engine.bench.decode import TABLES, decode_suite, format_decode

        tables = TABLES if options.tables == "both" else (options.tables,)
        report = decode_suite(config, options.max_new_tokens, options.repeats or 2, say, tables)
        text = format_decode(report)
    print(json.dumps(report, ensure_ascii=False) if options.json else text)
    return 0


def _upcycle(options: argparse.Namespace) -> int:
    from engine.upcycle.recipe import Recipe

    recipe = Recipe(options.experts, options.top_k, options.noise, options.seed)
    text = read_text(options.text, "the text")
    from engine.upcycle.convert import format_report, upcycle  # after the checks: torch takes seconds to import

    report = upcycle(options.base, options.out, text, recipe, _progress_line(sys.stderr))
    print(json.dumps(report, ensure_ascii=False) if options.json else format_report(report))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from engine.doctor import examine, format_doctor

    config = None
    if options.model is not None:
        config = EngineConfig(model=options.model, draft=options.draft, cache=options.cache, dtype=options.dtype)
    report = examine(config)
    print(json.dumps(report, ensure_ascii=False) if options.json else format_doctor(report))
    return 0


def _progress_line(stream: TextIO) -> Callable[[str, int, int], None]:
    """Shows loading on one line of a terminal; says nothing when the output is a file."""
    if not stream.isatty():
        return lambda stage, done, total: None

    pace = Pace()

    def show(stage: str, done: int, total: int) -> None:
        text = describe(stage, done, total, pace.rate(stage, done, time.monotonic()))
        stream.write(CLEAR_LINE + (text if not total or done < total else ""))
        stream.flush()

    return show


def _emitter(screen: Console | None, trace: TraceFile) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        trace.write(event)
        if screen is not None:
            screen.show(event)

    return emit
