"""A small seeded model of the engine that plays a scenario and emits real event objects.

One link moves one expert at a time, demands before prefetches; each layer has its own slots (LRU).
Nothing here is a claim about speed: the times are only plausible.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from engine import events as ev

MS = 1_000_000
STORY = (
    "Once upon a time, there was a little girl named Lily who had a red kite. She ran up the green hill with "
    "her dog Max, and the wind was strong. The kite went up, up, up in the blue sky! “Look, Max,” she said, "
    "“it can see our house from there.” Max barked and jumped. Then the string broke, and the kite flew to a "
    "big tree. Lily was sad, but a kind boy named Tom helped her to get it back. They shared an apple and "
    "became best friends, and every day they flew the red kite together.\n\n"
)
HOSTILE = [
    "${alert(1)}",
    "`",
    "<img src=x onerror=alert(1)>",
    "</script>",
    "\u202egnirts",
    "\ufffd",
    "{{value}}",
    "\\u12",
]


@dataclass
class Scenario:
    """What to play. `k` is a draft length, or one a round; `knobs` maps a round to (name, old, new)."""

    seed: int = 0
    k: int | list[int] = 4
    tokens: int = 24
    sequences: int = 1
    layers: int = 4
    experts: int = 8
    top_k: int = 2
    slots: int = 4
    accept: float = 0.8
    foresight: float = 0.9
    transfer_ms: float = 0.7
    auto: bool = False
    knobs: dict[int, tuple[str, Any, Any]] = field(default_factory=dict)
    eos_round: int | None = None
    stop_round: int | None = None
    hostile: bool = False
    kernels: str = "avx512"


@dataclass
class Copy:
    """An expert in a slot, or on its way to one."""

    transfer: int
    cause: str
    ready: int
    used: bool = False
    last: int = 0


class Player:
    """Plays a scenario and collects its events; `play` returns them as JSON objects with seq."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.rng = random.Random(scenario.seed)
        self.now = 0
        self.round = 0
        self.events: list[ev.Event] = []
        self.cache: list[dict[int, Copy]] = [{} for _ in range(scenario.layers)]
        self.queue: list[tuple[int, int, int]] = []  # prefetches not begun: (queued, layer, expert)
        self.link_free = 0
        self.transfers = 0
        self.evicted: list[list[int]] = []
        self.topic = [self.rng.sample(range(scenario.experts), scenario.experts) for _ in range(scenario.layers)]
        self.words = [word if i == 0 else " " + word for i, word in enumerate(STORY.split(" "))]
        self.cursor = [0] * scenario.sequences
        self.emitted = [0] * scenario.sequences

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)

    def work(self, lane: str, op: str, layer: int, rows: int, ms: float) -> None:
        start, self.now = self.now, self.now + int(ms * MS * self.rng.uniform(0.85, 1.2))
        self.emit(ev.Compute(self.now, self.round, lane, op, layer, rows, start, self.now))

    # The link

    def move(self, layer: int, expert: int, cause: str, queued: int, start: int) -> Copy:
        end = start + int(self.s.transfer_ms * MS * self.rng.uniform(0.95, 1.1))
        self.link_free = end
        self.transfers += 1
        nbytes = 147_456
        overtaken = cause == "prefetch" and self.transfers % 3 == 0
        pauses = [[start + (end - start) // 4, start + (end - start) // 2]] if overtaken else []
        self.emit(
            ev.Transfer(end, self.transfers, self.round, layer, expert, cause, queued, start, end, nbytes, pauses)
        )
        self.make_room(layer, start)
        copy = self.cache[layer][expert] = Copy(self.transfers, cause, end, last=start)
        return copy

    def make_room(self, layer: int, t: int) -> None:
        slots = self.cache[layer]
        if len(slots) < self.s.slots:
            return
        victim = min(slots, key=lambda e: (slots[e].ready > t, slots[e].last))
        copy = slots.pop(victim)
        if copy.cause == "prefetch" and not copy.used:
            self.emit(ev.Settled(max(t, copy.ready), copy.transfer, "wasted"))
        self.evicted.append([layer, victim])

    def run_link(self) -> None:
        """Begin the queued prefetches that the link reaches before now."""
        while self.queue and max(self.link_free, self.queue[0][0]) < self.now:
            queued, layer, expert = self.queue.pop(0)
            if expert not in self.cache[layer]:
                self.move(layer, expert, "prefetch", queued, max(self.link_free, queued))

    def cancel(self) -> None:
        for queued, layer, expert in self.queue:
            self.transfers += 1
            t = self.now
            self.emit(ev.Transfer(t, self.transfers, self.round, layer, expert, "prefetch", queued, t, t, 0))
            self.emit(ev.Settled(t, self.transfers, "cancelled"))
        self.queue.clear()

    # One round

    def routes(self) -> list[list[int]]:
        """The experts of one token: near the front of each layer's favourites, which drift."""
        picks = []
        for order in self.topic:
            if self.rng.random() < 0.1:
                order.append(order.pop(0))
            weights = [1 / (1 + rank) for rank in range(len(order))]
            first = self.rng.choices(order, weights)[0]
            rest = [e for e in order if e != first]
            picks.append(sorted([first, *self.rng.sample(rest[: 2 + len(rest) // 2], self.s.top_k - 1)]))
        return picks

    def draft(self, k: int, chunk: list[list[list[int]]]) -> None:
        for i in range(k):
            self.work("draft", "token", -1, self.s.sequences, 1.1)
            for layer, experts in enumerate(chunk[i]):
                for expert in experts:
                    seen = self.rng.random() < self.s.foresight
                    guess = expert if seen else self.rng.randrange(self.s.experts)
                    queued = any((layer, guess) == job[1:] for job in self.queue)
                    if guess not in self.cache[layer] and not queued:
                        self.queue.append((self.now, layer, guess))
            self.run_link()

    def verify(self, chunk: list[list[list[int]]]) -> tuple[list[int], list[list[int]], int, int]:
        counts, used, stalled, moved = [0, 0, 0], [], 0, 0
        rows = len(chunk)
        for layer in range(self.s.layers):
            self.work("verify", "attention", layer, rows, 0.35)
            self.run_link()
            wanted = sorted({expert for token in chunk for expert in token[layer]})
            used.append(wanted)
            start, ready = self.now, self.now
            for expert in wanted:
                copy = self.cache[layer].get(expert)
                if copy is None:
                    counts[2] += 1
                    copy = self.move(layer, expert, "demand", self.now, max(self.now, self.link_free))
                    self.emit(ev.Settled(copy.ready, copy.transfer, "demand"))
                    moved += 1
                elif copy.ready > self.now:
                    counts[1] += 1
                    outcome = "late" if copy.cause == "prefetch" and not copy.used else None
                    if outcome:
                        self.emit(ev.Settled(self.now, copy.transfer, outcome))
                    moved += 1
                else:
                    counts[0] += 1
                    if copy.cause == "prefetch" and not copy.used:
                        self.emit(ev.Settled(self.now, copy.transfer, "used"))
                copy.used, copy.last = True, self.now
                ready = max(ready, copy.ready)
            ready_compute = start + int(0.25 * MS)
            if ready > ready_compute:
                self.emit(ev.Stall(ready, self.round, layer, ready_compute, ready))
                stalled += ready - ready_compute
            self.now = max(ready, ready_compute) + int(0.12 * MS * len(wanted))
            self.emit(ev.Compute(self.now, self.round, "verify", "experts", layer, rows, start, self.now))
        self.work("verify", "head", -1, rows, 0.2)
        return counts, used, stalled, moved * 147_456

    def token(self, sequence: int, state: str, position: int, experts: list[list[int]], drafted: bool) -> ev.Token:
        words = HOSTILE if self.s.hostile and self.rng.random() < 0.5 else self.words
        text = words[self.cursor[sequence] % len(words)]
        self.cursor[sequence] += 1
        p = round(self.rng.betavariate(6, 2), 4)
        alternatives = [[text, p], [" and", round((1 - p) * 0.6, 4)], [" the", round((1 - p) * 0.2, 4)]]
        p_draft = round(min(1.0, p * self.rng.uniform(0.7, 1.2)), 4) if drafted else None
        return ev.Token(self.rng.randrange(4096), text, state, position, p, p_draft, alternatives, experts)

    def outcome(self, sequence: int, k: int, chunk: list[list[list[int]]], times: tuple[int, ...], stall: int) -> None:
        accepted = 0
        ends = self.round == self.s.eos_round
        while accepted < k and (ends or self.rng.random() < self.s.accept):
            accepted += 1
        last = "plain" if k == 0 else "bonus" if accepted == k else "corrected"
        tokens = [self.token(sequence, "accepted", i, chunk[i], True) for i in range(accepted)]
        tokens.append(self.token(sequence, last, accepted, chunk[accepted], k > accepted))
        if ends:
            # The text ends with the second draft token: what was accepted behind it is cut.
            tokens = tokens[:2]
        tokens = tokens[: max(1, self.s.tokens - self.emitted[sequence])]
        self.emitted[sequence] += len(tokens)
        rejected = [
            ev.Rejected(self.rng.randrange(4096), " oops", i, i == accepted, *((0.01, 0.4) if i == accepted else ()))
            for i in range(accepted, k)
        ]
        verified = min(k, accepted + 1)
        start, draft_end, verify_start, verify_end = times
        self.emit(
            ev.Round(
                self.now, self.round, sequence, k, k, verified, accepted, tokens, rejected,
                start, draft_end, verify_start, verify_end, stall,
            )
        )  # fmt: skip

    def step(self) -> None:
        planned = self.s.k
        k = planned[min(self.round, len(planned) - 1)] if isinstance(planned, list) else planned
        if self.round in self.s.knobs:
            self.emit(ev.KnobChange(self.now, self.round, *self.s.knobs[self.round], version=len(self.s.knobs)))
        self.govern(k)
        self.evicted = []
        start = self.now
        chunks = [[self.routes() for _ in range(k + 1)] for _ in range(self.s.sequences)]
        flat = [token for position in zip(*chunks, strict=True) for token in position]
        self.draft(k, flat)
        draft_end = self.now
        counts, used, stalled, sync_bytes = self.verify(flat)
        times = (start, draft_end, draft_end, self.now)
        self.cancel()
        self.now += int(0.1 * MS)
        before = sum(self.emitted)
        for sequence in range(self.s.sequences):
            self.outcome(sequence, k, chunks[sequence], times, stalled)
        resident = [sorted(e for e, copy in slots.items() if copy.ready <= self.now) for slots in self.cache]
        self.emit(ev.CacheState(self.now, self.round, self.s.slots, resident, used, self.evicted, *counts))
        seconds, tokens = (self.now - start) / 1e9, sum(self.emitted) - before
        roof = tokens / (seconds - stalled / 1e9)
        link = 147_456 / (self.s.transfer_ms / 1e3)
        self.emit(ev.RooflinePoint(self.now, self.round, k, tokens, seconds, sync_bytes, sync_bytes, link, roof))
        self.round += 1

    def govern(self, k: int) -> None:
        a = self.s.accept
        tokens = [sum(a**i for i in range(length + 1)) for length in range(9)]
        seconds = [(4.2 + 1.15 * n + 3.5 / (1 + n) + 0.11 * n * n) / 1e3 for n in range(9)]
        rates = [n / s for n, s in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        reason = (
            f"k = {k} was set by hand; k = {best} is predicted to be fastest"
            if not self.s.auto
            else (
                f"k = {k} is predicted at {rates[k]:.0f} tokens/s; one more draft token would cost more than it brings"
            )
        )
        probing = self.s.auto and k != best
        self.emit(ev.GovernorChoice(self.now, self.round, k, self.s.auto, probing, reason, tokens, seconds, rates))

    # The run

    def start(self) -> None:
        s = self.s
        model = {
            "name": "stories-moe", "architecture": "Qwen3MoeForCausalLM", "layers": s.layers, "moe_layers": s.layers,
            "experts": s.experts, "top_k": s.top_k, "hidden": 192, "expert_bytes": 147_456, "dtype": "bfloat16",
            "vocab": 4096,
        }  # fmt: skip
        machine = {"cpu": "Synthetic CPU", "cores": 2, "memory_gib": 24.0, "device": "cpu", "kernels": s.kernels}
        gbps = round(147_456 / (self.s.transfer_ms * MS), 4)
        link = {
            "kind": "emulated", "label": f"emulated {gbps} GB/s", "gbps": gbps, "latency_us": 0.0, "emulated": True,
        }  # fmt: skip
        config = {"model": "stories-moe", "draft": "self-int4", "policy": "lru", "prefetch": "draft",
                  "k": "auto" if s.auto else s.k if isinstance(s.k, int) else s.k[0], "seed": s.seed}  # fmt: skip
        draft, cache = s.layers * s.experts * 147_456 // 3, s.layers * s.slots * 147_456
        memory = {"shared": 5_000_000, "draft": draft, "cache": cache, "kv": 400_000,
                  "total": 5_400_000 + draft + cache}  # fmt: skip
        prompts = [[{"id": 1, "text": "Tell"}, {"id": 2, "text": " a story"}, {"id": 3, "text": ".\n"}]] * s.sequences
        schema = ev.SCHEMA_VERSION
        self.emit(ev.Load(0, "experts", 9_000_000, 22_000_000))
        self.emit(ev.RunStart(0, schema, model, machine, link, config, memory, s.slots, prompts, 1_760_000_000.0))
        self.emit(ev.Phase(0, "prefill", f"{3 * s.sequences} tokens"))
        self.round = -1
        for layer in range(s.layers):
            self.work("prefill", "attention", layer, 3, 0.5)
            self.prefill_miss(layer)
            self.work("prefill", "experts", layer, 3, 0.8)
        empty: list[list[int]] = [[] for _ in range(s.layers)]
        self.emit(ev.CacheState(self.now, -1, s.slots, empty, empty, [], 0, 0, s.layers))
        self.round = 0
        self.emit(ev.Phase(self.now, "decode"))

    def prefill_miss(self, layer: int) -> None:
        """A demand that the prefill waits for, of an expert that is evicted again before decoding begins."""
        start, number = self.now, -1 - layer
        self.now += int(self.s.transfer_ms * MS)
        self.emit(ev.Transfer(self.now, number, -1, layer, 0, "demand", start, start, self.now, 147_456))
        self.emit(ev.Settled(self.now, number, "demand"))
        self.emit(ev.Stall(self.now, -1, layer, start, self.now))

    def finish(self) -> None:
        self.run_link()
        stopped = self.s.stop_round is not None
        if stopped:
            # Stopped in the middle of a draft: compute without a round at its end.
            self.work("draft", "token", -1, self.s.sequences, 1.1)
        end = max(self.now, self.link_free)
        for slots in self.cache:
            for copy in slots.values():
                if copy.cause == "prefetch" and not copy.used:
                    self.emit(ev.Settled(end, copy.transfer, "wasted"))
        reason = "cancelled" if stopped else "eos" if self.s.eos_round is not None else "length"
        summary = [{"new_tokens": n, "finish_reason": reason} for n in self.emitted]
        self.emit(ev.RunEnd(end, "stopped" if stopped else "finished", None, summary))

    def play(self) -> list[dict[str, Any]]:
        self.start()
        while max(self.emitted) < self.s.tokens and self.round != self.s.stop_round:
            self.step()
            if self.s.eos_round is not None and self.round > self.s.eos_round:
                break
        self.finish()
        ordered = sorted(self.events, key=lambda event: event.t)
        return [{"seq": seq, **event.to_json()} for seq, event in enumerate(ordered, 1)]
