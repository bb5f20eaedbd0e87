// Everything the panels show, from a run's events. The same reducer as specviz/metrics.py, which has the
// formulas; tests/golden holds the two together.

import { Cache, Roofline, Transfers } from "./experts.js";
import { Overlap } from "./overlap.js";
import { Acceptance, Clock, Control, pick } from "./reducers.js";

const RUN_FACTS = ["schema", "model", "machine", "link", "config", "memory", "slots_per_layer", "started_unix"];

/** The state of one run. Feed it events in order with `add`; memory is bounded however long the run. */
export class Metrics {
  seq = 0;
  lost = 0;
  t = 0;
  run = { status: "waiting", error: null, phase: null, phase_t: null, sequences: 0 };
  facts = null;
  load = null;
  acceptance = new Acceptance();
  clock = new Clock();
  transfers = new Transfers();
  overlap = new Overlap();
  cache = new Cache();
  roofline = new Roofline();
  control = new Control();

  /** Take one event. Returns false for an event seen before (by seq). */
  add(event) {
    if (event.seq !== undefined && event.seq !== null) {
      if (event.seq <= this.seq) return false;
      this.lost += event.seq - this.seq - 1;
      this.seq = event.seq;
    }
    this.t = Math.max(this.t, event.t);
    // hasOwn, so that a kind named like a method of Object is unknown too.
    if (Object.hasOwn(HANDLERS, event.kind)) HANDLERS[event.kind](this, event);
    return true;
  }

  toJSON() {
    return {
      seq: this.seq,
      lost: this.lost,
      t: this.t,
      run: { ...this.run },
      facts: this.facts,
      load: this.load,
      acceptance: this.acceptance.toJSON(),
      time: this.clock.toJSON(),
      transfers: this.transfers.toJSON(),
      overlap: this.overlap.toJSON(),
      experts: this.cache.toJSON(),
      roofline: this.roofline.toJSON(),
      governor: this.control.governorJSON(),
      knobs: this.control.knobsJSON(),
    };
  }
}

const HANDLERS = {
  load(metrics, event) {
    metrics.load = pick(event, ["stage", "done_bytes", "total_bytes"]);
    metrics.run.status = "loading";
  },
  run_start(metrics, event) {
    metrics.facts = pick(event, RUN_FACTS);
    metrics.run.status = "running";
    metrics.run.sequences = event.prompts.length;
    metrics.cache.shape(event);
  },
  phase(metrics, event) {
    metrics.run.phase = event.phase;
    metrics.run.phase_t = event.t;
    if (event.phase === "decode") {
      metrics.transfers = new Transfers();
      metrics.overlap = new Overlap();
      metrics.cache.beginDecode();
      metrics.clock.beginDecode();
    }
  },
  round(metrics, event) {
    metrics.acceptance.round(event);
    metrics.clock.round(event);
    // All compute up to the round's end is known by now.
    metrics.overlap.fold(event.t);
  },
  transfer(metrics, event) {
    metrics.transfers.transfer(event);
    metrics.overlap.transfer(event.start, event.end, event.pauses);
  },
  settled: (metrics, event) => metrics.transfers.settled(event),
  compute: (metrics, event) => metrics.overlap.compute(event.start, event.end),
  stall(metrics, event) {
    metrics.clock.waited(event);
    metrics.overlap.stall(event.start, event.end);
  },
  cache: (metrics, event) => metrics.cache.state(event),
  knob: (metrics, event) => metrics.control.knob(event),
  governor: (metrics, event) => metrics.control.choice(event),
  roofline: (metrics, event) => metrics.roofline.point(event),
  run_end(metrics, event) {
    metrics.run.status = event.status;
    metrics.run.error = event.error;
    metrics.overlap.fold();
  },
};

/** The metrics of a whole run, e.g. of a recording. */
export function reduce(events) {
  const metrics = new Metrics();
  for (const event of events) metrics.add(event);
  return metrics;
}
