"""Settings of the engine: frozen dataclasses that validate themselves, and the knobs that move while it runs."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UsageError

EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "assets" / "models" / "stories-moe"
UPCYCLING_TEXT = Path(__file__).resolve().parent.parent / "assets" / "upcycling.txt"

DTYPES = ("float32", "bfloat16")
DRAFTS = ("self-int4", "self-int8", "self-int3", "self-int2", "sparse", "sparse-1", "ngram", "none")
#: A small model drafts: its directory or hub id follows.
MODEL_DRAFT = "model:"
POLICIES = ("lookahead", "lru", "lfu")
#: "auto" streams layers where a batch wants nearly all experts of each, else it lets the governor choose between
#: "draft" and "none", round by round.
PREFETCH_SOURCES = ("auto", "draft", "next-layer", "stream", "none")
#: What the compiled kernels can compute: attention, the target's linear layers (and norms), its experts, the draft's
#: experts.
KERNELS = ("attention", "linear", "experts", "draft")
K_LIMIT = 16
#: Sequences that a run may serve at a time.
BATCH_LIMIT = 256
LINKS = "disk, host, emulated:GBPS[:LATENCY_US] or emulated:PRESET"
# What an emulated link may be set to: GB/s, and microseconds a transfer.
LINK_GBPS = (0.0001, 1000)
LINK_LATENCY_US = (0, 100_000)
#: What becomes of a missed expert: it is fetched, or computed by the processor where it lies, or whichever is quicker.
MISSES = ("auto", "fetch", "compute")


def draft_model_id(draft: str) -> str | None:
    """The directory or hub id of the small model that drafts; None for all other drafts."""
    return draft.removeprefix(MODEL_DRAFT) if draft.startswith(MODEL_DRAFT) else None


def parse_draft(text: str) -> str:
    """One of DRAFTS, or `model:` with a directory or hub id behind. Raises UsageError."""
    if text in DRAFTS or draft_model_id(text):
        return text
    raise UsageError(f"unknown draft {text!r}: use one of {', '.join(DRAFTS)}, {MODEL_DRAFT}PATH_OR_ID")


def cache_directory() -> Path:
    """Where packs and kernels live: `$SPECVIZ_CACHE`, else `$XDG_CACHE_HOME/specviz`, else `~/.cache/specviz`."""
    if own := os.environ.get("SPECVIZ_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specviz"


@dataclass(frozen=True)
class LinkConfig:
    """The slow tier. `kind` is disk, host (main memory) or emulated.

    `gbps` is GB/s (1e9 bytes), `latency_us` microseconds a transfer;
    `preset` names the published machine whose ratio of transfer to compute time `gbps` will reproduce, if any.
    """

    kind: str = "disk"
    gbps: float | None = None
    latency_us: float = 0.0
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("disk", "host", "emulated"):
            raise UsageError(f"unknown link {self.kind!r}: use {LINKS}")
        if self.kind == "emulated" and self.gbps is None and self.preset is None:
            raise UsageError("an emulated link needs a bandwidth or a preset: emulated:GBPS[:LATENCY_US]")
        if self.gbps is not None and not LINK_GBPS[0] <= self.gbps <= LINK_GBPS[1]:
            raise UsageError(f"link bandwidth {self.gbps:g} GB/s is out of range: use {_span(*LINK_GBPS)}")
        if not LINK_LATENCY_US[0] <= self.latency_us <= LINK_LATENCY_US[1]:
            raise UsageError(f"link latency {self.latency_us:g} us is out of range: use {_span(*LINK_LATENCY_US)}")

    @classmethod
    def parse(cls, text: str) -> LinkConfig:
        """`disk`, `host`, `emulated:GBPS[:LATENCY_US]` or `emulated:PRESET`. Raises UsageError."""
        kind, *rest = text.split(":")
        if kind in ("disk", "host") and not rest:
            return cls(kind)
        if kind == "emulated" and 1 <= len(rest) <= 2:
            try:
                return cls(kind, gbps=float(rest[0]), latency_us=float(rest[1]) if len(rest) == 2 else 0.0)
            except ValueError:
                if len(rest) == 1 and rest[0]:
                    return cls(kind, preset=rest[0])
        raise UsageError(f"unknown link {text!r}: use {LINKS}")


@dataclass(frozen=True)
class CacheBudget:
    """How much of the experts the fast tier holds: a share of all experts, bytes, or slots a layer.

    Exactly one of the three is set.
    """

    share: float | None = None
    nbytes: int | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.share, self.nbytes, self.slots)) != 1:
            raise UsageError("a cache budget is a share, a number of bytes or a number of slots a layer, one of them")
        if self.share is not None and not 0 < self.share <= 1:
            raise UsageError(f"cache {self.share:.0%} is out of range: use more than 0% and up to 100%")
        if self.nbytes is not None and self.nbytes <= 0:
            raise UsageError("a cache budget in bytes must be positive")
        if self.slots is not None and self.slots < 1:
            raise UsageError("the cache needs at least 1 slot a layer")

    @classmethod
    def parse(cls, text: str) -> CacheBudget:
        """`25%`, `64MiB` (KiB, MiB, GiB, KB, MB, GB) or `N` slots a layer. Raises UsageError."""
        text = text.strip()
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
            return cls(share=float(match[1]) / 100)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG])(i?)B", text):
            base = 1024 if match[3] else 1000
            return cls(nbytes=int(float(match[1]) * base ** ("KMG".index(match[2]) + 1)))
        if re.fullmatch(r"\d+", text):
            return cls(slots=int(text))
        raise UsageError(f"unknown cache budget {text!r}: use a share (25%), bytes (64MiB) or slots a layer (4)")

    def slots_per_layer(self, experts: int, layers: int, expert_bytes: int) -> int:
        """Slots a layer that this budget buys; 0 when it does not buy one."""
        if self.slots is not None:
            return min(self.slots, experts)
        if self.share is not None:
            return min(max(1, round(self.share * experts)), experts)
        assert self.nbytes is not None
        return min(self.nbytes // (layers * expert_bytes), experts)

    def extra_slots(self, experts: int, layers: int, expert_bytes: int) -> int:
        """Slots that the budget buys beyond those, too few for one in every layer."""
        if self.nbytes is None or self.nbytes >= experts * layers * expert_bytes:
            return 0
        return self.nbytes // expert_bytes % layers


@dataclass(frozen=True)
class EngineConfig:
    """What is decided when a model is loaded.

    `model`: a directory or a hub id. `draft`: one of DRAFTS, or `model:PATH_OR_ID`. `pack`: build and use the
    page-aligned pack of the experts (False reads byte ranges of the original shards). `threads`: CPU threads of
    torch; None chooses by the size of the experts. `kernels`: those of KERNELS that may compute where torch would
    otherwise, if this machine can build them (`engine/kernels/native.py`); () is none. `device`: auto (CUDA behind
    a host link, where there is one), cpu, cuda or cuda:N. `misses`: one of MISSES; only a host link can compute.
    """

    model: str = str(EMBEDDED_MODEL)
    dtype: str = "float32"
    draft: str = "self-int4"
    policy: str = "lookahead"
    prefetch: str = "auto"
    cache: CacheBudget = CacheBudget(share=0.25)
    link: LinkConfig = LinkConfig()
    threads: int | None = None
    pack: bool = True
    kernels: tuple[str, ...] = KERNELS
    device: str = "auto"
    misses: str = "auto"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UsageError(f"unknown device {self.device!r}: use auto, cpu, cuda or cuda:N")
        _one_of("misses", self.misses, MISSES)
        if self.misses == "compute" and self.link.kind != "host":
            raise UsageError(f"a missed expert cannot be computed behind link {self.link.kind}: use --link host")
        for kernel in self.kernels:
            _one_of("kernel", kernel, KERNELS)
        _one_of("dtype", self.dtype, DTYPES)
        parse_draft(self.draft)
        _one_of("policy", self.policy, POLICIES)
        _one_of("prefetch", self.prefetch, PREFETCH_SOURCES)
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise UsageError(f"threads {self.threads} is out of range: use 1 to 1024")


def parse_kernels(text: str) -> tuple[str, ...]:
    """`all`, `none`, or names of KERNELS with commas between, in any order. Raises UsageError."""
    if text == "all":
        return KERNELS
    if text == "none":
        return ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KERNELS:
            raise UsageError(f"unknown kernel {name!r}: use all, none, or some of {','.join(KERNELS)}")
    return tuple(name for name in KERNELS if name in names)


@dataclass(frozen=True)
class GenerationConfig:
    """What is decided for one request. `k` is a draft length from 0 to K_LIMIT, or "auto".

    `chat`: the prompt is a user's message, put into the model's chat template; else it is continued as it is.
    `batch`: sequences served at a time at most; more prompts wait for one to finish.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    k: int | str = "auto"
    k_max: int = 8
    chat: bool = False
    batch: int = 32

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError("max-new-tokens must be at least 1")
        if not 1 <= self.batch <= BATCH_LIMIT:
            raise UsageError(f"batch {self.batch} is out of range: use {_span(1, BATCH_LIMIT)}")
        if not 0 <= self.temperature <= 10:
            raise UsageError(f"temperature {self.temperature:g} is out of range: use 0 to 10")
        if self.top_k < 0:
            raise UsageError("top-k must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p:g} is out of range: use more than 0, up to 1")
        if any(not text for text in self.stop):
            raise UsageError("a stop string must not be empty")
        KNOBS["k"].check(self.k)
        KNOBS["k_max"].check(self.k_max)
        KNOBS["seed"].check(self.seed)


def _span(minimum: float, maximum: float) -> str:
    return f"{minimum:.10g} to {maximum:.10g}"


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"unknown {name} {value!r}: use one of {', '.join(known)}")


@dataclass(frozen=True)
class Knob:
    """One setting that a person may move, as the controls of the page are generated from it.

    `kind`: "int", "float", "choice", or "auto_int" (an integer or the string "auto").
    `live` knobs take effect at the next round; the others with the next run.
    """

    name: str
    label: str
    kind: str
    default: Any
    minimum: float = 0
    maximum: float = 0
    step: float = 1
    choices: tuple[str, ...] = ()
    unit: str = ""
    live: bool = True
    help: str = ""

    def check(self, value: Any) -> Any:
        """The value in its proper type. Raises UsageError with the allowed range."""
        if self.kind == "choice":
            if value not in self.choices:
                raise UsageError(f"unknown {self.name} {value!r}: use one of {', '.join(self.choices)}")
            return value
        if self.kind == "auto_int" and value == "auto":
            return value
        allowed = _span(self.minimum, self.maximum) + (" or auto" if self.kind == "auto_int" else "")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.minimum <= value <= self.maximum:
            raise UsageError(f"{self.name} {value!r} is out of range: use {allowed}")
        if self.kind == "float":
            return float(value)
        if value != int(value):
            raise UsageError(f"{self.name} {value!r} is not a whole number: use {allowed}")
        return int(value)


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob("k", "Draft length k", "auto_int", "auto", 0, K_LIMIT, unit="tokens",
             help="Tokens drafted before each verification; 0 decodes plainly, auto lets the governor choose."),
        Knob("k_max", "Governor's longest draft", "int", 8, 1, K_LIMIT, unit="tokens",
             help="The governor chooses k from 0 to this."),
        Knob("prefetch", "Prefetch source", "choice", "auto", choices=PREFETCH_SOURCES,
             help="Who says which experts to fetch ahead: the draft's routers, the next layer's router, what most "
                  "passes wanted (stream, for batches), or nobody; auto lets the governor choose between the draft "
                  "and nobody, and streams for a batch that wants most experts."),
        Knob("prefetch_depth", "Prefetch depth", "int", 64, 1, 64, unit="layers",
             help="How many layers ahead of the verification experts may be fetched."),
        Knob("policy", "Eviction policy", "choice", "lookahead", choices=POLICIES,
             help="Which resident expert makes room for another."),
        Knob("slots", "Cache slots a layer", "int", 4, 1, 512, unit="experts",
             help="Experts of each layer that fast memory holds."),
        Knob("link_gbps", "Emulated link bandwidth", "float", 1.0, *LINK_GBPS, step=0.001, unit="GB/s",
             help="Only for an emulated link."),
        Knob("link_latency_us", "Emulated link latency", "float", 0.0, *LINK_LATENCY_US, step=10, unit="µs",
             help="Only for an emulated link; added to every transfer."),
        Knob("temperature", "Temperature", "float", 0.0, 0, 2, step=0.05, live=False,
             help="0 takes the likeliest token."),
        Knob("top_k", "Top-k", "int", 0, 0, 1000, live=False, help="Keep the k likeliest tokens; 0 keeps all."),
        Knob("top_p", "Top-p", "float", 1.0, 0.01, 1, step=0.01, live=False,
             help="Keep the smallest set of tokens whose probability reaches p."),
        Knob("seed", "Seed", "int", 0, 0, 2**31 - 1, live=False, help="The same seed and settings give the same text."),
        Knob("max_new_tokens", "New tokens", "int", 160, 1, 4096, live=False, unit="tokens",
             help="Where to stop at the latest."),
    )
}  # fmt: skip


@dataclass(frozen=True)
class KnobUpdate:
    """A value that waits for the engine. `version` counts all updates of its block."""

    name: str
    value: Any
    version: int


class KnobBlock:
    """The live knobs of one run: set from any thread, taken by the engine at the start of each round.

    A burst of settings of one knob keeps the last. `values` are those in effect.
    """

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = {name: knob.default for name, knob in KNOBS.items() if knob.live}
        self._lock = threading.Lock()
        self._pending: dict[str, KnobUpdate] = {}
        self._version = 0
        for name, value in values.items():
            self.values[name] = self._check(name, value)

    @staticmethod
    def _check(name: str, value: Any) -> Any:
        knob = KNOBS.get(name)
        if knob is None:
            raise UsageError(f"unknown knob {name!r}: use one of {', '.join(k for k, v in KNOBS.items() if v.live)}")
        if not knob.live:
            raise UsageError(f"{name} takes effect with the next run only")
        return knob.check(value)

    def set(self, name: str, value: Any, version: int | None = None) -> int:
        """Ask for a new value; returns the version under which the engine will acknowledge it. Raises UsageError.

        `version` is for a block that follows another one, which has counted already.
        """
        value = self._check(name, value)
        with self._lock:
            self._version = self._version + 1 if version is None else version
            self._pending[name] = KnobUpdate(name, value, self._version)
            return self._version

    def take(self) -> list[tuple[KnobUpdate, Any]]:
        """The updates that take effect now, oldest first, each with the value it replaces."""
        with self._lock:
            updates = sorted(self._pending.values(), key=lambda update: update.version)
            self._pending.clear()
            changes = [(update, self.values[update.name]) for update in updates]
            self.values.update({update.name: update.value for update in updates})
            return changes
