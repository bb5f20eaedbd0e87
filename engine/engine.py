"""The engine: draft, prefetch, verify, accept, commit."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from engine import events
from engine.calibration import measure_kv_bytes, measure_layer_seconds
from engine.config import K_LIMIT, EngineConfig, GenerationConfig, KnobBlock
from engine.control.governor import Choice, Governor
from engine.control.observation import Memory, Observation
from engine.control.presets import emulated_gbps, find_preset
from engine.errors import Cancelled, EngineError, one_line
from engine.events import Event
from engine.loading import LoadedModel, Progress, load_model
from engine.offload.cache import ExpertCache
from engine.offload.emulated import EmulatedLink
from engine.offload.experts import OffloadedExperts, QuantizedExperts
from engine.offload.host_link import HostLink
from engine.offload.in_place import InPlace
from engine.offload.resident import ResidentExperts
from engine.passes import PassObserver
from engine.report import cache_state, governor_choice, kernels_label, roofline_point, run_start, summarize
from engine.requests import Request
from engine.roofs import measure_roofs
from engine.run import Run, open_run
from engine.speculation.batch import Sequence
from engine.speculation.drafters import Draft, Drafter, DraftRun, NoDrafter, create_drafter, sparse_experts
from engine.speculation.outcome import RoundView, outcome
from engine.speculation.prefetcher import Prefetcher
from engine.speculation.sampling import Verdict, distribution, match, verify
from engine.speculation.seam import flaw, padded

# Rows of a prefill pass: bounds the activations of a long prompt.
PREFILL_ROWS = 512


class Engine:
    """A loaded model whose experts stay on the slow side of a link. One thread drives it.

    Use `Engine.load`, then `generate` as often as you like, then `close`.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self.config = config
        self.loaded = loaded
        table = loaded.source.table
        self.passes = PassObserver()
        self.cache = ExpertCache(
            table,
            loaded.slots_per_layer,
            getattr(torch, config.dtype),
            loaded.link,
            config.policy,
            self.passes,
            extra=loaded.extra_slots,
            device=loaded.device,
        )
        self.policy = config.policy
        self.kernels = kernels_label(config.kernels, loaded.kernels)
        self.roofs = measure_roofs(config.dtype, str(loaded.device), torch.get_num_threads())
        self.passes.attach(None, self.cache)
        in_place = None
        if isinstance(loaded.link, HostLink):
            module = loaded.skeleton.experts_modules[0]
            in_place = InPlace(loaded.link, module, config.misses, loaded.host_kernels)
        self.target_experts = OffloadedExperts(self.cache, self.passes, "experts" in loaded.kernels, in_place)
        self.draft_experts = self._create_draft_experts()
        self.kv_bytes_per_token = measure_kv_bytes(loaded, self.passes, self.draft_experts or self.target_experts)
        self.cache.reset()
        link = loaded.link
        if config.link.preset is not None and isinstance(link, EmulatedLink):
            layer_seconds = measure_layer_seconds(loaded, self.cache, self.passes, self.target_experts)
            machine = find_preset(config.link.preset)
            link.set_rate(emulated_gbps(machine, table.shape.nbytes, layer_seconds), config.link.latency_us)
        guess = loaded.router_probe.guess if loaded.router_probe else None
        self.prefetcher = self.passes.prefetcher = Prefetcher(self.cache, table.layers, guess)
        self.governor = self.new_governor()

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Engine:
        """Load a model. `progress(stage, done bytes, total bytes)`; total is 0 while unknown.

        Raises ModelError, CheckpointError, BudgetError, UsageError; Cancelled when `cancelled()` turns true.
        """
        loaded = load_model(config, progress or (lambda stage, done, total: None), cancelled or (lambda: False))
        try:
            return cls(config, loaded)
        except BaseException:
            loaded.close()
            raise

    @property
    def top_k(self) -> int:
        """Experts that a token is routed to in each layer."""
        config = self.loaded.runner.config
        return int(getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_top_k", None) or 1)

    def new_governor(self) -> Governor:
        """One that knows nothing yet."""
        return Governor(K_LIMIT, self.loaded.source.table.experts, self.top_k)

    def knobs(self, options: GenerationConfig) -> KnobBlock:
        """The live knobs at the values that this engine was loaded with."""
        values: dict[str, Any] = {
            "k": options.k,
            "k_max": options.k_max,
            "prefetch": self.config.prefetch,
            "policy": self.config.policy,
            "slots": self.loaded.slots_per_layer,
        }
        link = self.loaded.link
        if isinstance(link, EmulatedLink):
            values |= {"link_gbps": link.gbps, "link_latency_us": link.latency_us}
        return KnobBlock(**values)

    def close(self) -> None:
        """Stop the link's workers and free the slots. The engine cannot be used after."""
        try:
            self.cache.close()
        finally:
            self.loaded.close()

    def generate(
        self,
        prompts: Iterable[str | Request],
        options: GenerationConfig,
        *,
        knobs: KnobBlock | None = None,
        emit: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
    ) -> list[dict[str, Any]]:
        """Generate for all prompts, `options.batch` at a time; returns the command line's JSON object for each.

        `emit` hears every event, from this and from the link's threads; a run that started always ends with
        RunEnd. `stop` ends the run within one layer; its unfinished results are marked cancelled. Raises
        UsageError for prompts that cannot run, before any event, and TransferError when the link fails, after
        RunEnd.
        """
        knobs, stop = knobs or self.knobs(options), stop or threading.Event()
        run = open_run(self.loaded, prompts, options, knobs, self._create_drafter, emit, stop)
        error: BaseException | None = None
        status = "finished"
        try:
            self._start(run)
            while run.batch.sequences or run.batch.waiting:
                self._admit(run)
                self.step(run)
            run.recorder.check()
        except Cancelled:
            status = "stopped"
        except BaseException as failure:
            # Also what a listener raised, or an interrupt: the next run must not find a layer half done.
            status, error = "failed", failure
        try:
            self.cache.settle()
        except EngineError as failure:
            status, error = "failed", error or failure
        for sequence in run.sequences:
            sequence.finish_reason = sequence.finish_reason or "cancelled"
        results = [summarize(self, run, sequence) for sequence in run.sequences]
        told = one_line(error) if error is not None else None
        run.recorder.emit(events.RunEnd(run.recorder.now(), status, told, results))
        if error is not None:
            raise error
        run.recorder.check()
        return results

    def step(self, run: Run) -> None:
        """One round: every unfinished sequence drafts, is verified, and emits at least one token."""
        begin = run.recorder.decode_end
        choice = self._schedule(run)
        start = run.recorder.now()
        draft = self._draft(run, choice.k)
        draft_end = run.recorder.now()
        logits = self._verify(run, draft)
        verify_end = run.recorder.now()
        verdict = self._accept(run, draft, logits)
        times = {"start": start, "draft_end": draft_end, "verify_start": draft_end, "verify_end": verify_end}
        rounds = self._commit(run, choice.k, draft, logits, verdict, times)
        self._learn(run, draft, rounds, begin)

    def _schedule(self, run: Run) -> Choice:
        """Apply the knobs that were moved, and let the governor choose k."""
        run.round += 1
        if run.stop.is_set():
            raise Cancelled("stopped")
        recorder = run.recorder
        recorder.begin_round(run.round)
        for update, old in run.knobs.take():
            self._apply(update.name, update.value)
            recorder.emit(events.KnobChange(recorder.now(), run.round, update.name, old, update.value, update.version))
        knobs = run.knobs.values
        source = self._stream_for(run)
        choice = self.governor.choose(
            knobs["k"],
            knobs["k_max"],
            source if run.drafter.routes else "none",
            self.slow_memory,
            run.drafter.drafts,
            max(sequence.remaining for sequence in run.batch.sequences) - 1,
            len(run.batch.sequences),
        )
        if knobs["prefetch"] == "auto" and source == "auto":
            self._prefetch_by("draft" if choice.prefetch else "none")
        if run.draft_alarm is not None:
            choice = dataclasses.replace(choice, auto=True, reason=run.draft_alarm)
        recorder.emit(governor_choice(run, choice))
        return choice

    def _draft(self, run: Run, k: int) -> Draft:
        """Up to k tokens a sequence; their routes fill the lookahead buffer and start transfers."""
        self.prefetcher.begin_round(k)
        self.passes.begin("draft")
        draft = run.drafter.draft(run.batch, k, self.passes.token_drafted)
        wrong = flaw(draft, run.batch, k, self.vocab)
        if wrong is not None:
            self._switch_off(run, f"a draft was refused: {wrong}. This is a bug of the drafter")
            draft = Draft.empty(len(run.batch.sequences))
        self.prefetcher.plan_complete()
        return padded(draft)

    def _verify(self, run: Run, draft: Draft) -> torch.Tensor:
        """The target's logits (batch, k+1, vocab) for the newest token and all draft tokens, in one pass."""
        batch, rows = run.batch, draft.lengths + 1
        self.passes.begin("verify", rows.tolist())
        ids = torch.cat([batch.current, draft.tokens], dim=1)
        logits = self.loaded.runner.forward(batch.cache, self.target_experts, ids, batch.slots, batch.starts, rows)
        self.passes.end()
        return logits

    def _accept(self, run: Run, draft: Draft, logits: torch.Tensor) -> Verdict:
        if run.params.temperature == 0:
            return match(logits.argmax(-1), draft.tokens, draft.lengths)
        target = distribution(logits, run.params)
        luck = run.batch.draw((draft.lengths + 1).tolist())
        return verify(target, draft.q(self.vocab), draft.tokens, draft.lengths, luck)

    def _commit(
        self, run: Run, k: int, draft: Draft, logits: torch.Tensor, verdict: Verdict, times: dict[str, Any]
    ) -> list[events.Round]:
        """Emit the tokens, move the KV lengths, and let finished sequences leave the batch."""
        recorder, loaded = run.recorder, self.loaded
        self.passes.accepted((verdict.accepted + 1).tolist())
        view = RoundView(draft, verdict, logits, run.params, self.passes.routes, loaded.eos_ids, loaded.tokenizer)
        outcomes = [outcome(view, number, sequence) for number, sequence in enumerate(run.batch.sequences)]
        stall_ns, now = recorder.round_stall_ns(), recorder.now()
        rounds = [
            events.Round(t=now, round=run.round, k=k, stall_ns=stall_ns, **times, **fields) for fields in outcomes
        ]
        recorder.end_round(rounds)
        for sequence in run.batch.sequences:
            run.batch.cache.commit(sequence.slot, sequence.cached)
            sequence.emitted(recorder.decode_end)
        run.batch.dismiss()
        return rounds

    def _learn(self, run: Run, draft: Draft, rounds: list[events.Round], begin: int) -> None:
        """Report the cache, feed the governor, and place the round, which took from `begin` on, on the roofline."""
        recorder, first = run.recorder, rounds[0]
        recorder.emit(cache_state(self, run))
        wanted, misses = self.passes.experts_by_rows()
        observation = Observation(
            k=draft.k,
            prefetch=self.prefetches(run) and draft.k > 0,
            draft_seconds=(first.draft_end - first.start) / 1e9,
            verify_seconds=(first.verify_end - first.verify_start - first.stall_ns) / 1e9,
            stall_seconds=first.stall_ns / 1e9,
            seconds=(recorder.decode_end - begin) / 1e9,
            tokens=sum(len(r.tokens) for r in rounds),
            lengths=[(r.verified, r.accepted) for r in rounds],
            wanted=wanted,
            misses=misses,
        )
        self.governor.observe(observation, self.slow_memory)
        recorder.emit(roofline_point(run, observation, self.loaded.link.bytes_per_s))
        run.watch.observe(observation.lengths)
        if run.watch.hopeless and run.draft_alarm is None:
            seen = f"{run.watch.right} of {run.watch.tried} first tokens were accepted"
            self._switch_off(run, f"{seen}: this drafter does not know this text")

    def _switch_off(self, run: Run, reason: str) -> None:
        """Decode plainly for the rest of the run, and say so."""
        run.draft_alarm = f"the {self.config.draft} draft is switched off: {reason}"
        run.drafter = NoDrafter(run.drafter.nbytes)
        run.recorder.emit(events.DraftAlarm(run.recorder.now(), run.round, self.config.draft, run.draft_alarm))

    def _create_draft_experts(self) -> QuantizedExperts | ResidentExperts | None:
        most = sparse_experts(self.config.draft)
        if most is not None:
            return ResidentExperts(self.cache, self.passes, most, native="experts" in self.loaded.kernels)
        return QuantizedExperts(self.loaded.draft_experts, self.passes) if self.loaded.draft_experts else None

    def _create_drafter(self, run: DraftRun) -> Drafter:
        return create_drafter(self.config.draft, self.loaded.runner, self.draft_experts, self.loaded.draft_model, run)

    def _start(self, run: Run) -> None:
        self.target_experts.stop = run.stop
        if self.draft_experts is not None:
            self.draft_experts.stop = run.stop
        for name, value in run.knobs.values.items():
            self._apply(name, value)
        self.passes.attach(run.recorder, self.cache)
        run.recorder.emit(run_start(self, run))

    def _admit(self, run: Run) -> None:
        """Let waiting sequences have the KV slots that are free, and read their prompts (continuous batching).

        The first ones open the decoding; what those that join later cost is part of it, because all wait for them.
        """
        recorder, first = run.recorder, not run.round
        if first:
            recorder.emit(events.Phase(recorder.now(), "prefill"))
        start, joined = recorder.now(), run.batch.admit()
        self._stream_for(run)
        self._prefill(run, joined)
        run.drafter.join(joined)
        for sequence in joined:
            recorder.emit(events.Join(recorder.now(), run.round, sequence.number, sequence.slot, start))
        if first:
            recorder.emit(cache_state(self, run))
            recorder.emit(events.Phase(recorder.now(), "decode"))
            run.prefill_stats = self.cache.stats
            recorder.begin_decode()
        elif joined:
            recorder.emit(cache_state(self, run))
            recorder.resume_decode()
        for sequence in joined:
            sequence.joined_at = recorder.decode_end

    def _prefill(self, run: Run, joined: list[Sequence]) -> None:
        """Fill the KV cache with all prompt tokens but the last, of all sequences in the same passes.

        The last one is the newest token of a sequence's first round, so the prefill emits nothing.
        """
        start = 0
        while left := [s for s in joined if s.cached > start]:
            width = min(max(PREFILL_ROWS // len(left), 1), max(s.cached for s in left) - start)
            chunks = [s.prompt_ids[start : min(start + width, s.cached)] for s in left]
            ids = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks])
            slots, rows = torch.tensor([s.slot for s in left]), torch.tensor([len(chunk) for chunk in chunks])
            starts = torch.full_like(rows, start)
            self.passes.begin("prefill", rows.tolist())
            self.loaded.runner.forward(run.batch.cache, self.target_experts, ids, slots, starts, rows, keep=1)
            self.passes.end()
            start += width
        for sequence in joined:
            run.batch.cache.commit(sequence.slot, sequence.cached)

    def _apply(self, name: str, value: Any) -> None:
        """Bring one live knob into effect; k and k_max are read when a round is scheduled."""
        link = self.loaded.link
        if name == "policy" and value != self.policy:
            self.cache.set_policy(value)
            self.policy = value
        elif name == "slots":
            self.cache.resize(min(value, self.loaded.source.table.experts))
        elif name == "prefetch":
            if value != "auto":  # else each round's choice sets it
                self._prefetch_by(value)
        elif name == "prefetch_depth":
            self.prefetcher.depth = value
        elif name == "link_gbps" and isinstance(link, EmulatedLink):
            link.set_rate(value, link.latency_us)
        elif name == "link_latency_us" and isinstance(link, EmulatedLink):
            link.set_rate(link.gbps, value)

    def _stream_for(self, run: Run) -> str:
        """Let layers stream if that is for us to decide and the batch is large; says who foresees, or "auto" still.

        A batch of b sequences with b ≥ experts / top_k asks for as many experts as a layer has, so that few of them
        are not wanted (SpecMoEOff, section 3). What a smaller one wants is for the draft to say, and for the governor.
        """
        source, batch = run.knobs.values["prefetch"], len(run.batch.sequences)
        if source == "auto" and batch > 1 and batch * self.top_k >= self.loaded.source.table.experts:
            source = "stream"
            self._prefetch_by(source)
        return source

    def _prefetch_by(self, source: str) -> None:
        self.prefetcher.source = source
        self.cache.set_streaming(source == "stream")

    @property
    def vocab(self) -> int:
        """Rows of the output head: as many ids as it has tokens, or a few more."""
        return self.loaded.runner.config.vocab_size

    @property
    def draft_nbytes(self) -> int:
        """Bytes of fast memory for whoever drafts, whatever the run: a quantized copy of the experts, or a model."""
        small = self.loaded.draft_model
        copied = self.draft_experts.nbytes if self.draft_experts is not None else 0
        return copied + (small.weight_nbytes if small is not None else 0)

    def prefetches(self, run: Run) -> bool:
        """Whether the draft's routes start transfers."""
        return self.prefetcher.source == "draft" and run.drafter.routes

    @property
    def slow_memory(self) -> Memory:
        """What the link takes for one expert, and how many the cache holds."""
        link = self.loaded.link
        latency_us = link.latency_us if isinstance(link, EmulatedLink) else 0.0
        transfer_seconds = self.loaded.source.table.shape.nbytes / max(link.bytes_per_s, 1.0) + latency_us / 1e6
        return Memory(transfer_seconds, self.cache.total_slots)
