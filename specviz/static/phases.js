// The hierarchical roofline of a run: what each phase computed, read and moved, and how long it took, over the last
// rounds. Counted from the events and the model's sizes; keys and values, which are small here, are left out.

import { bytes } from "./format.js";

const ROUNDS = 20;
/** Bytes of a weight as it computes. */
const WIDTH = { float32: 4, bfloat16: 2 };

const sums = () => ({ flops: 0, bytes: 0, ns: 0 });

export class Phases {
  #sizes = null;
  #rounds = new Map(); // number → what it came to; those before the last few are forgotten
  #machine = null;
  #link = null;

  add(event) {
    if (event.kind === "run_start") this.#begin(event);
    else if (!this.#sizes) return;
    else if (event.kind === "compute" && event.lane !== "prefill") this.#compute(event);
    else if (event.kind === "cache") this.#of(event.round).experts.bytes += (event.hits + event.late + event.misses) * this.#sizes.expert;
    else if (event.kind === "roofline") Object.assign(this.#of(event.round), { moved: event.moved_bytes, ns: event.seconds * 1e9, over: true });
    else if (event.kind === "stall") this.#of(event.round).stall += event.end - event.start;
  }

  #begin({ model, machine, link, memory }) {
    const width = WIDTH[model.dtype];
    if (!width || !model.hidden) return;
    const table = model.hidden * model.vocab * width; // the embedding: rows of it are looked up, not read
    this.#sizes = {
      width,
      shared: Math.max(memory.shared - table, 0),
      expert: model.expert_bytes,
      topK: model.top_k,
      layers: model.moe_layers,
      // A drafter without a copy of its own uses the experts that are resident.
      drafts: memory.draft ? memory.draft / (model.moe_layers * model.experts * model.expert_bytes) : 1,
    };
    this.#machine = machine;
    this.#link = link;
  }

  #of(round) {
    if (!this.#rounds.has(round)) {
      this.#rounds.set(round, { draft: sums(), attention: sums(), experts: sums(), moved: 0, stall: 0, ns: 0, over: false });
      if (this.#rounds.size > ROUNDS + 2) this.#rounds.delete(this.#rounds.keys().next().value);
    }
    return this.#rounds.get(round);
  }

  #compute({ round, lane, op, rows, start, end }) {
    const { width, shared, expert, topK, layers, drafts } = this.#sizes;
    const phase = this.#of(round)[lane === "draft" ? "draft" : op === "experts" ? "experts" : "attention"];
    phase.ns += end - start;
    const routed = topK * expert; // of one row in one layer
    const flops = (weights) => (2 * rows * weights) / width;
    if (lane === "draft") {
      phase.flops += flops(shared + layers * routed);
      phase.bytes += shared + layers * routed * drafts;
    } else if (op === "experts") {
      phase.flops += flops(routed);
    } else if (op === "head") {
      // Once a pass: all shared weights were read once, for all its rows.
      phase.flops += flops(shared);
      phase.bytes += shared;
    }
  }

  /** What `roofsFigure` draws, or null while nothing was measured: roofs, and phases with their `measured` TFLOP/s. */
  report() {
    const rounds = [...this.#rounds.values()].filter((round) => round.over).slice(-ROUNDS);
    const { tflops, memory_gbps: memory, read_bytes: read } = this.#machine?.roofs ?? {};
    if (!rounds.length) return null;
    const sum = (name, key) => rounds.reduce((total, round) => total + round[name][key], 0);
    const stall = rounds.reduce((total, round) => total + round.stall, 0);
    const moved = rounds.reduce((total, round) => total + round.moved, 0);
    const link = this.#link.gbps;
    const where = /cuda/.test(this.#machine.device) ? "gpu" : "cpu";
    const roofline = [];
    const place = (phase, flops, amount, ns, roofs) => {
      if (!flops || !amount || ns <= 0) return;
      const known = roofs.filter(([, limit]) => Number.isFinite(limit));
      const [binds, limit] = known.reduce((least, roof) => (roof[1] < least[1] ? roof : least), ["nothing known", Infinity]);
      roofline.push({ phase, where, intensity: flops / amount, tflops: limit, binds, measured: flops / ns / 1e3 });
    };
    const own = (flops, amount) => [["arithmetic", tflops], ["memory", (memory * flops) / amount / 1e3]];
    for (const [name, phase] of [["draft", "draft"], ["attention", "shared weights"], ["experts", "experts"]]) {
      const [flops, amount] = [sum(name, "flops"), sum(name, "bytes")];
      place(phase, flops, amount, sum(name, "ns") - (name === "experts" ? stall : 0), own(flops, amount));
    }
    const flops = sum("experts", "flops");
    // The link may work in all of the round, so all of it counts.
    place("experts, whole round", flops, moved, rounds.reduce((total, round) => total + round.ns, 0), [["arithmetic", tflops], ["the link", (link * flops) / moved / 1e3]]);
    const roofs = [
      { roof: `${where} arithmetic`, tflops, gbps: null },
      { roof: `${where} memory (${bytes(read)} read)`, tflops: null, gbps: memory },
    ].filter((roof) => Number.isFinite(roof.tflops ?? roof.gbps));
    if (link) roofs.push({ roof: `the link${this.#link.emulated ? " (emulated)" : ""}`, tflops: null, gbps: link });
    return { roofs, roofline };
  }
}
