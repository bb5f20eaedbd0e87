"""One run of a batch as a bench sees it: tokens, where a round's time went, and how busy the link was."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from engine import events
from engine.bench.contenders import Contender
from engine.bench.table import format_columns
from engine.config import GenerationConfig
from engine.engine import Engine
from engine.events import Event
from engine.intervals import Interval, clip, covered, merge
from engine.overlap import moving
from engine.report import batch_figures

#: Tokens of the run that warms cache and estimators up.
WARM_UP_TOKENS = 4


@dataclass
class LinkWatch:
    """Hears a run's events. `busy`: when at least one transfer moved; `rounds`: all sequences' parts of each round."""

    rounds: dict[int, list[events.Round]] = field(default_factory=dict)
    loads: list[tuple[Interval, int]] = field(default_factory=list)
    _moved: list[Interval] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        """Any event; called from the link's threads, too."""
        if isinstance(event, events.Round):
            self.rounds.setdefault(event.round, []).append(event)
        elif isinstance(event, events.Transfer) and event.bytes:
            self._moved += moving(event.start, event.end, event.pauses)
            self.loads.append(((event.start, event.end), event.bytes))

    @property
    def wall(self) -> Interval:
        """From the first round's start to the last one's end, in ns."""
        return _span([parts[0] for parts in self.rounds.values()])

    @property
    def busy(self) -> list[Interval]:
        """Inside the wall."""
        return clip(merge(self._moved), self.wall)

    def full(self, sequences: int) -> tuple[int, float]:
        """(tokens, seconds) of the rounds in which all `sequences` took part: nobody had finished yet."""
        full = [parts for parts in self.rounds.values() if len(parts) == sequences]
        start, end = _span([parts[0] for parts in full])
        return sum(len(part.tokens) for parts in full for part in parts), (end - start) / 1e9


def _span(rounds: list[events.Round]) -> Interval:
    return min(r.start for r in rounds), max(r.t for r in rounds)


@dataclass(frozen=True)
class BatchRun:
    """What one run did. Seconds are sums over its rounds; `texts` are token ids.

    `full_tokens` came in `full_seconds`, while all sequences decoded: a batch that waiting prompts keep full.
    """

    sequences: int
    new_tokens: int
    seconds: float
    full_tokens: int
    full_seconds: float
    rounds: int
    draft_s: float
    verify_s: float
    stall_s: float
    link_s: float
    bytes_loaded: int
    prefill_s: float
    mean_acceptance_length: float | None
    slots: int
    draft_and_cache: int
    memory_total: int
    texts: list[list[int]]

    @property
    def full_rate(self) -> float:
        """Tokens/s while all sequences decode."""
        return self.full_tokens / self.full_seconds


def run_batch(engine: Engine, contender: Contender, prompts: list[str], max_new_tokens: int) -> BatchRun:
    """All prompts as one batch at temperature 0, behind a short run that warms up."""
    options = GenerationConfig(max_new_tokens=max_new_tokens, k=contender.k, batch=len(prompts))
    engine.generate(prompts, dataclasses.replace(options, max_new_tokens=WARM_UP_TOKENS))
    watch = LinkWatch()
    results = engine.generate(prompts, options, emit=watch.hear)
    first, figures, (start, end) = results[0], batch_figures(results), watch.wall
    full_tokens, full_seconds = watch.full(len(prompts))
    return BatchRun(
        sequences=len(prompts),
        new_tokens=figures["new_tokens"],
        seconds=figures["decode_s"],
        full_tokens=full_tokens,
        full_seconds=full_seconds,
        rounds=len(watch.rounds),
        draft_s=first["time"]["draft_s"],
        verify_s=first["time"]["verify_s"],
        stall_s=first["time"]["stall_s"],
        link_s=covered(watch.busy) / 1e9,
        bytes_loaded=sum(nbytes for (_, ended), nbytes in watch.loads if start < ended <= end),
        prefill_s=start / 1e9,
        mean_acceptance_length=first["mean_acceptance_length"],
        slots=engine.cache.total_slots,
        draft_and_cache=first["memory"]["draft"] + first["memory"]["cache"],
        memory_total=first["memory"]["total"],
        texts=[result["token_ids"] for result in results],
    )


def batch_row(contender: Contender, runs: list[BatchRun], base: list[BatchRun]) -> dict[str, Any]:
    """A contender's figures over all its runs: sums first, then shares. `binds` is what a round has most of.

    `tokens_per_s` is that of whole runs, whose last sequences are fewer and fewer; `full_tokens_per_s` before that.
    """

    def total(name: str, of: list[BatchRun] = runs) -> float:
        return sum(getattr(run, name) for run in of)

    seconds, rounds, link_s = total("seconds"), total("rounds"), total("link_s")
    compute_s = total("draft_s") + total("verify_s")
    lengths = [run.mean_acceptance_length for run in runs if run.mean_acceptance_length is not None]
    rate, full = total("new_tokens") / seconds, total("full_tokens") / total("full_seconds")
    return {
        "name": contender.name,
        "draft": contender.config.draft,
        "k": contender.k,
        "batch": runs[0].sequences,
        "prompts": int(total("sequences")),
        "slots": runs[0].slots,
        "ratio": rate / (total("new_tokens", base) / total("seconds", base)),
        "tokens_per_s": rate,
        "full_ratio": full / (total("full_tokens", base) / total("full_seconds", base)),
        "full_tokens_per_s": full,
        "mean_acceptance_length": sum(lengths) / len(lengths) if lengths else None,
        "round_s": seconds / rounds,
        "draft_s": total("draft_s") / rounds,
        "verify_s": total("verify_s") / rounds,
        "stall_s": total("stall_s") / rounds,
        "link_busy": link_s / seconds,
        "link_bytes_per_s": total("bytes_loaded") / link_s if link_s else None,
        "bytes_per_round": total("bytes_loaded") / rounds,
        "binds": "link" if link_s > compute_s else "compute",
        "prefill_s": total("prefill_s") / len(runs),
        "draft_and_cache": max(run.draft_and_cache for run in runs),
        "memory_total": max(run.memory_total for run in runs),
    }


def format_batch_rows(rows: list[dict[str, Any]]) -> list[str]:
    """The table's lines."""
    heads = ["contender", "draft", "k", "batch", "slots", "full tokens/s", "ratio", "whole run",
             "ratio", "tokens/round", "round ms", "draft",
             "verify", "stall", "link busy", "GB/s", "MB/round", "binds"]  # fmt: skip
    cells = [
        [row["name"], row["draft"], str(row["k"]), str(row["batch"]), str(row["slots"]),
         f"{row['full_tokens_per_s']:.1f}", f"{row['full_ratio']:.2f}", f"{row['tokens_per_s']:.1f}",
         f"{row['ratio']:.2f}",
         f"{row['mean_acceptance_length'] or 1:.2f}",
         *(f"{row[name] * 1e3:.0f}" for name in ("round_s", "draft_s", "verify_s", "stall_s")),
         f"{row['link_busy']:.0%}", f"{(row['link_bytes_per_s'] or 0) / 1e9:.2f}",
         f"{row['bytes_per_round'] / 1e6:.0f}", row["binds"]]
        for row in rows
    ]  # fmt: skip
    return format_columns([heads, *cells], left=2)
