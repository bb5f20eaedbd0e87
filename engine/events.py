"""What the engine tells the world while it runs: frozen dataclasses of plain JSON types.

Times are integers in nanoseconds since the run's start (`RunStart.t` is 0). Bytes are bytes, rates
are per second. `layer` counts MoE layers from 0; -1 means "the whole pass". Sequences of one batch
are told apart by `sequence`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

SCHEMA_VERSION = 1

#: States of an emitted token. "plain" comes from a round without a draft, "bonus" is the token that the
#: target adds when every draft token was accepted, "corrected" replaces the first rejected draft token.
TOKEN_STATES = ("prompt", "plain", "accepted", "corrected", "bonus")

#: How a transfer ended. "used": ready before its expert was needed. "late": still moving when it was
#: needed. "demand": nobody foresaw it. "wasted": evicted, or the run ended, before any use.
#: "cancelled": the plan changed before it was complete.
TRANSFER_OUTCOMES = ("used", "late", "demand", "wasted", "cancelled")


@dataclass(frozen=True)
class Event:
    """Base of all events. `t` is when it happened."""

    kind: ClassVar[str] = "event"
    t: int

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object, with its `kind`."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Load(Event):
    """Progress of loading a model, before a run. `total_bytes` is 0 while unknown."""

    kind: ClassVar[str] = "load"
    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class RunStart(Event):
    """The first event of a run: everything needed to read the others.

    `model`: name, architecture, layers, moe_layers, experts, top_k, hidden, expert_bytes, dtype, vocab.
    `machine`: cpu, cores, memory_gib, device, kernels (the compiled kernels' variant, or "torch (the reason)"), and
    roofs: memory_gbps and tflops as measured, see `measure_roofs`.
    `link`: kind, label, gbps, latency_us, emulated.
    `memory`: shared, draft, cache, kv, total (bytes). `prompts`: one list of {"id", "text"} a sequence.
    """

    kind: ClassVar[str] = "run_start"
    schema: int
    model: dict[str, Any]
    machine: dict[str, Any]
    link: dict[str, Any]
    config: dict[str, Any]
    memory: dict[str, int]
    slots_per_layer: int
    prompts: list[list[dict[str, Any]]]
    started_unix: float


@dataclass(frozen=True)
class Phase(Event):
    """The run entered a phase: prefill, decode."""

    kind: ClassVar[str] = "phase"
    phase: str
    detail: str = ""


@dataclass(frozen=True)
class Join(Event):
    """`sequence` joined the batch, in the KV cache's `slot`: its prompt was read from `start` to `t`.

    Those of a run's first batch join in round 0, others behind `round`.
    """

    kind: ClassVar[str] = "join"
    round: int
    sequence: int
    slot: int
    start: int


@dataclass(frozen=True)
class Token:
    """One emitted token.

    `text` is the text that became complete with it ("" inside a character of several bytes).
    `position` is its place in the round's chunk, from 0. `p_target` and `p_draft` are probabilities after
    temperature, top-k and top-p; at temperature 0 those of temperature 1 are told. `p_draft` is null where
    the draft did not propose this token. `alternatives` are the target's likeliest, [text, probability].
    `experts` lists, per MoE layer, the experts that the token which *produced* this one was routed to.
    """

    id: int
    text: str
    state: str
    position: int
    p_target: float
    p_draft: float | None = None
    alternatives: list[list[Any]] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Rejected:
    """A draft token that was verified and rejected, or drafted behind one (`verified` false)."""

    id: int
    text: str
    position: int
    verified: bool
    p_target: float | None = None
    p_draft: float | None = None


@dataclass(frozen=True)
class Round(Event):
    """One round of one sequence; emitted at its end.

    `k` is the draft length asked for, `drafted` what was drafted, `verified` the draft tokens that
    were reached (accepted ones and the first rejected one), `accepted` ⊆ verified.
    `finished` with the sequence's last round.
    start ≤ draft_end ≤ verify_start ≤ verify_end ≤ t. `stall_ns` is the part of the verification in
    which the engine waited for experts. Batches: every sequence reports the round's common times.
    """

    kind: ClassVar[str] = "round"
    round: int
    sequence: int
    k: int
    drafted: int
    verified: int
    accepted: int
    tokens: list[Token]
    rejected: list[Rejected]
    start: int
    draft_end: int
    verify_start: int
    verify_end: int
    stall_ns: int
    finished: bool = False


@dataclass(frozen=True)
class Transfer(Event):
    """An expert crossed the link (or was cancelled on it); emitted when the link is done with it.

    `cause` is "demand" or "prefetch", as the transfer was *issued*; `bytes` are those really moved.
    `pauses` are the [start, end] stretches inside start … end in which it was overtaken by others.
    """

    kind: ClassVar[str] = "transfer"
    id: int
    round: int
    layer: int
    expert: int
    cause: str
    queued: int
    start: int
    end: int
    bytes: int
    pauses: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Settled(Event):
    """What became of transfer `id`: one of `TRANSFER_OUTCOMES`. Exactly one for each `Transfer`."""

    kind: ClassVar[str] = "settled"
    id: int
    outcome: str


@dataclass(frozen=True)
class Compute(Event):
    """The engine computed something: `lane` draft, verify or prefill; `op` token, attention, experts, head."""

    kind: ClassVar[str] = "compute"
    round: int
    lane: str
    op: str
    layer: int
    rows: int
    start: int
    end: int


@dataclass(frozen=True)
class Stall(Event):
    """The engine waited for experts of `layer` from `start` to `end`."""

    kind: ClassVar[str] = "stall"
    round: int
    layer: int
    start: int
    end: int


@dataclass(frozen=True)
class CacheState(Event):
    """The expert cache after a round: who is resident, who was used, and the round's counts.

    hits + late + misses = requests of this round (distinct experts a layer and pass).
    `evicted` holds [layer, expert] pairs in order.
    """

    kind: ClassVar[str] = "cache"
    round: int
    slots_per_layer: int
    resident: list[list[int]]
    used: list[list[int]]
    evicted: list[list[int]]
    hits: int
    late: int
    misses: int


@dataclass(frozen=True)
class KnobChange(Event):
    """A knob took effect at `round`; `version` is the one that the setter was told."""

    kind: ClassVar[str] = "knob"
    round: int
    name: str
    old: Any
    new: Any
    version: int


@dataclass(frozen=True)
class GovernorChoice(Event):
    """Why this draft length. The lists are indexed by k from 0 to k_max; tokens are those of all sequences of a batch.

    `auto` is false when a person fixed k (the predictions are still made). `expected_tokens[k]` and
    `predicted_seconds[k]` give `predicted_rate[k]`, in tokens/s. `prefetch`: whether the draft's routes start
    transfers in this round; the predictions are for all k with that.
    """

    kind: ClassVar[str] = "governor"
    round: int
    k: int
    auto: bool
    probing: bool
    reason: str
    expected_tokens: list[float]
    predicted_seconds: list[float]
    predicted_rate: list[float]
    prefetch: bool = False


@dataclass(frozen=True)
class DraftAlarm(Event):
    """The drafter was switched off after `round`, for the rest of the run, and why."""

    kind: ClassVar[str] = "draft_alarm"
    round: int
    draft: str
    reason: str


@dataclass(frozen=True)
class RooflinePoint(Event):
    """The amortization roofline's operating point of one round (MoE-SpeQ, section 3.2, bonus token included).

    `tokens` emitted in `seconds`, while `sync_bytes` were moved synchronously (the engine waited for
    them). `link_bytes_per_s` is the slope of the I/O roof; `compute_tokens_per_s` the horizontal roof:
    the rate if no transfer had been waited for.
    """

    kind: ClassVar[str] = "roofline"
    round: int
    k: int
    tokens: int
    seconds: float
    sync_bytes: int
    moved_bytes: int
    link_bytes_per_s: float
    compute_tokens_per_s: float


@dataclass(frozen=True)
class Connection(Event):
    """How a run on another machine arrives (`engine/serve/client.py`); a local engine never tells it.

    `behind_s`: seconds by which the network made what is known here older than it was at first. `lost`: events that
    the other machine had to forget before they could be sent.
    """

    kind: ClassVar[str] = "connection"
    connected: bool
    behind_s: float
    lost: int


@dataclass(frozen=True)
class RunEnd(Event):
    """The last event of a run. `status`: finished, stopped or failed; `error` is set when it failed.

    `summary` is the object that `python -m engine generate --json` prints (one a sequence).
    """

    kind: ClassVar[str] = "run_end"
    status: str
    error: str | None
    summary: list[dict[str, Any]]


EVENTS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        Load,
        RunStart,
        Phase,
        Join,
        Round,
        Transfer,
        Settled,
        Compute,
        Stall,
        CacheState,
        KnobChange,
        GovernorChoice,
        DraftAlarm,
        RooflinePoint,
        Connection,
        RunEnd,
    )
}
