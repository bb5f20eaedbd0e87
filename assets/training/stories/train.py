"""Train the embedded model from its corpus, on a CPU.

    python assets/training/stories/train.py --out build/stories --minutes 60

Writes `checkpoint.pt` (to resume from) and, at the end, `model/`: a standard transformers checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import IGNORE, Story, Windows, held_out_ids, read_real, read_synthetic, split_real, train_tokenizer
from export import export
from model import Trainee, stories_config
from optimizer import create_optimizers
from transformers import PreTrainedTokenizerFast

WARMUP_STEPS = 100
DECAY_FROM = 0.5  # of the run; from here on the learning rate falls in a line to almost nothing
PROBE_ROWS = 16  # held-out windows that are looked at while training; the end looks at all


@dataclass(frozen=True)
class Settings:
    """One training run. Exactly one of `minutes` (wall clock) and `steps` is set; `steps` is reproducible."""

    out: Path
    minutes: float | None = None
    steps: int | None = None
    threads: int = 2
    window: int = 512
    batch: int = 8
    dropout: float = 0.1
    real_repeats: int = 2
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    seed: int = 0
    compile: bool = False
    report_every: int = 100
    architecture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("give either minutes or steps")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout} is out of range: use 0 up to, not including, 1")


@dataclass
class Progress:
    """How far a run has come; saved with the weights."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def fraction(self, settings: Settings) -> float:
        """0 at the start, 1 at the end."""
        if settings.steps is not None:
            return self.step / settings.steps
        assert settings.minutes is not None
        return self.seconds / (60 * settings.minutes)


def learning_rate_scale(progress: Progress, settings: Settings) -> float:
    """Warm up, hold, then a line down to 1 %."""
    warm = min(1.0, (progress.step + 1) / WARMUP_STEPS)
    remaining = (1 - progress.fraction(settings)) / (1 - DECAY_FROM)
    return warm * max(0.01, min(1.0, remaining))


class Run:
    """Weights, optimizers and progress of one training, which a checkpoint holds in full."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(settings.seed)
        config = stories_config(**settings.architecture)
        if len(tokenizer) > config.vocab_size:
            raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}")
        self.settings, self.progress = settings, Progress()
        self.model = Trainee(config, settings.dropout)
        self.optimizers = create_optimizers(self.model, settings.muon_lr, settings.adam_lr)
        self.losses = torch.compile(self._losses) if settings.compile else self._losses
        self.full_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def _losses(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits, balance = self.model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE)
        return loss, balance

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """One update from a batch (windows, tokens); returns its loss in nats a token."""
        scale = learning_rate_scale(self.progress, self.settings)
        for optimizer, rates in zip(self.optimizers, self.full_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        loss, balance = self.losses(ids, labels)
        (loss + self.model.config.router_aux_loss_coef * balance).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += ids.numel()
        return loss.item()

    @torch.no_grad()
    def held_out_loss(self, rows: torch.Tensor) -> float:
        """Nats a token over windows (rows, window), by transformers' own forward pass: no expert has a capacity."""
        self.model.eval()
        losses = []
        for ids in rows.split(self.settings.batch):
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.model.lm(ids, use_cache=False).logits
            losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"))
        self.model.train()
        return (torch.stack(losses).sum() / rows[:, 1:].numel()).item()

    def save(self, path: Path) -> None:
        """Replaces the checkpoint in one move, so that an interrupted save leaves the old one."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
            "random": torch.get_rng_state(),
        }
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"])


def train(
    settings: Settings, real: list[Story], synthetic: list[Story], resume: bool, report: Callable[[str], None]
) -> float:
    """Trains to the end, exports to `out/model`, and returns the held-out loss in nats a token."""
    settings.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(settings.threads)
    train_real, held_out = split_real(real)
    tokenizer = train_tokenizer(train_real + synthetic, stories_config(**settings.architecture).vocab_size)
    windows = Windows(
        train_real * settings.real_repeats + synthetic, tokenizer, settings.window, settings.batch, settings.seed
    )
    rows = held_out_ids(held_out, tokenizer, settings.window)
    run = Run(settings, tokenizer)
    checkpoint = settings.out / "checkpoint.pt"
    if resume:
        run.load(checkpoint)
    report(
        f"{windows.tokens / 1e6:.2f} M tokens a pass, {rows.numel()} held out, "
        f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.1f} M parameters, from step {run.progress.step}"
    )

    before = run.progress.seconds
    start = time.monotonic()
    mean = None
    for ids, labels in windows.from_batch(run.progress.step):
        run.progress.seconds = before + time.monotonic() - start
        if run.progress.fraction(settings) >= 1:
            break
        loss = run.step(ids, labels)
        mean = loss if mean is None else 0.98 * mean + 0.02 * loss
        if run.progress.step % settings.report_every == 0:
            run.save(checkpoint)
            probe = run.held_out_loss(rows[:PROBE_ROWS])
            report(
                f"step {run.progress.step}, {run.progress.tokens / 1e6:.2f} M tokens, "
                f"{run.progress.fraction(settings):.0%}, loss {mean:.3f}, held out {probe:.3f}"
            )
    run.save(checkpoint)
    final = run.held_out_loss(rows)
    difference = export(run.model, tokenizer, settings.out / "model", rows[:1])
    report(f"held out {final:.3f} nats a token; exported, logits differ from transformers' by {difference:.1e}")
    return final


def parse(arguments: list[str] | None = None) -> tuple[Settings, bool]:
    """Command line → (settings, whether to resume)."""
    parser = argparse.ArgumentParser(description="Train the embedded story model on a CPU.")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, help="train for this long, by the wall clock")
    length.add_argument("--steps", type=int, help="train for this many batches (reproducible)")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint.pt and model/")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    parser.add_argument("--threads", type=int, default=Settings.threads)
    parser.add_argument("--window", type=int, default=Settings.window, help="tokens a window")
    parser.add_argument("--batch", type=int, default=Settings.batch, help="windows a batch")
    parser.add_argument("--dropout", type=float, default=Settings.dropout)
    parser.add_argument("--real-repeats", type=int, default=Settings.real_repeats, help="real stories a pass")
    parser.add_argument("--compile", action="store_true", help="torch.compile: a seventh faster, needs a C++ compiler")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    options = vars(parser.parse_args(arguments))
    resume = options.pop("resume")
    return Settings(**options), resume


if __name__ == "__main__":
    chosen, go_on = parse()
    train(chosen, read_real(), read_synthetic(), go_on, lambda line: print(line, flush=True))
