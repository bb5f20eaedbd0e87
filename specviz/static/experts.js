// The parts of the metrics about experts: what crossed the link, what the cache held, which resource is
// the limit. The same code as specviz/experts.py.

import { SERIES_LIMIT, WINDOW_ROUNDS, last, pick, push, ratio } from "./reducers.js";

export const POINTS_LIMIT = 120;
export const UNSETTLED_LIMIT = 16384;
export const HEAT_KEEP = 0.9;
export const OUTCOMES = ["used", "late", "demand", "wasted", "cancelled"];

/** What crossed the link, why, and what became of it. */
export class Transfers {
  causes = Object.fromEntries(["demand", "prefetch"].map((cause) => [cause, { count: 0, bytes: 0, ns: 0 }]));
  outcomes = Object.fromEntries(OUTCOMES.map((outcome) => [outcome, { count: 0, bytes: 0 }]));
  // The two halves of one transfer come from different threads, in either order.
  #moved = new Map();
  #fates = new Map();

  transfer(event) {
    const cause = this.causes[event.cause];
    cause.count += 1;
    cause.bytes += event.bytes;
    cause.ns += event.end - event.start;
    for (const [start, end] of event.pauses) cause.ns -= end - start;
    const outcome = this.#fates.get(event.id);
    if (outcome === undefined) {
      remember(this.#moved, event.id, event.bytes);
    } else {
      this.#fates.delete(event.id);
      this.#settle(outcome, event.bytes);
    }
  }

  settled(event) {
    const bytes = this.#moved.get(event.id);
    if (bytes === undefined) {
      remember(this.#fates, event.id, event.outcome);
    } else {
      this.#moved.delete(event.id);
      this.#settle(event.outcome, bytes);
    }
  }

  #settle(outcome, bytes) {
    this.outcomes[outcome].count += 1;
    this.outcomes[outcome].bytes += bytes;
  }

  toJSON() {
    const copy = (table) => Object.fromEntries(Object.entries(table).map(([key, sums]) => [key, { ...sums }]));
    return { by_cause: copy(this.causes), by_outcome: copy(this.outcomes), unsettled: this.#moved.size };
  }
}

function remember(table, key, value) {
  table.set(key, value);
  if (table.size > UNSETTLED_LIMIT) table.delete(table.keys().next().value);
}

/** Where are the experts, and were they there in time? Requests count an expert once a layer and pass. */
export class Cache {
  hits = 0;
  late = 0;
  misses = 0;
  evictions = 0;
  slots = null;
  resident = [];
  used = [];
  evicted = [];
  heat = [];
  #series = [];

  shape(event) {
    const { moe_layers: layers, experts } = event.model;
    const rows = (make) => Array.from({ length: layers }, make);
    this.slots = event.slots_per_layer;
    this.resident = rows(() => []);
    this.used = rows(() => []);
    this.heat = rows(() => new Array(experts).fill(0));
  }

  /** Forget what the prefill requested; what it left in the cache stays. */
  beginDecode() {
    this.hits = this.late = this.misses = this.evictions = 0;
    this.#series = [];
  }

  state(event) {
    this.hits += event.hits;
    this.late += event.late;
    this.misses += event.misses;
    this.evictions += event.evicted.length;
    this.slots = event.slots_per_layer;
    this.resident = event.resident;
    this.used = event.used;
    this.evicted = event.evicted;
    this.heat.forEach((row, layer) => {
      for (let expert = 0; expert < row.length; expert++) row[expert] *= HEAT_KEEP;
      for (const expert of this.used[layer] ?? []) row[expert] += 1 - HEAT_KEEP;
    });
    push(this.#series, pick(event, ["round", "hits", "late", "misses"]), SERIES_LIMIT);
  }

  toJSON() {
    const requests = this.hits + this.late + this.misses;
    const series = last(this.#series, SERIES_LIMIT);
    const window = { hits: 0, late: 0, misses: 0 };
    for (const point of last(series, WINDOW_ROUNDS)) for (const key in window) window[key] += point[key];
    const recent = window.hits + window.late + window.misses;
    return {
      requests,
      hits: this.hits,
      late: this.late,
      misses: this.misses,
      hit_rate: ratio(this.hits + this.late, requests),
      ready_rate: ratio(this.hits, requests),
      window: { ...window, requests: recent, hit_rate: ratio(window.hits + window.late, recent) },
      evictions: this.evictions,
      slots_per_layer: this.slots,
      resident: this.resident,
      used: this.used,
      evicted: this.evicted,
      heat: this.heat.map((row) => [...row]),
      series,
    };
  }
}

/** Which resource is the limit? Points of the amortization roofline (MoE-SpeQ, section 3.2). */
export class Roofline {
  #points = [];
  link = null;

  point(event) {
    const point = pick(event, ["round", "k", "tokens", "seconds", "sync_bytes", "moved_bytes"]);
    point.compute_roof = event.compute_tokens_per_s;
    point.rate = ratio(event.tokens, event.seconds);
    point.intensity = ratio(event.tokens, event.sync_bytes);
    this.link = event.link_bytes_per_s;
    push(this.#points, point, POINTS_LIMIT);
  }

  /** The last rounds as one operating point: sums, not averages of ratios. */
  #window() {
    const points = last(this.#points, WINDOW_ROUNDS);
    let tokens = 0;
    let bytes = 0;
    let seconds = 0;
    let computeSeconds = 0;
    for (const point of points) {
      tokens += point.tokens;
      bytes += point.sync_bytes;
      seconds += point.seconds;
      computeSeconds += point.compute_roof ? point.tokens / point.compute_roof : 0;
    }
    const intensity = ratio(tokens, bytes);
    const ioRoof = intensity !== null && this.link !== null ? intensity * this.link : null;
    const computeRoof = ratio(tokens, computeSeconds);
    const linked = ioRoof !== null && (computeRoof === null || ioRoof < computeRoof);
    return {
      rounds: points.length,
      tokens,
      seconds,
      sync_bytes: bytes,
      rate: ratio(tokens, seconds),
      intensity,
      io_roof: ioRoof,
      compute_roof: computeRoof,
      bound: points.length ? (linked ? "link" : "compute") : null,
    };
  }

  toJSON() {
    return { link_bytes_per_s: this.link, points: last(this.#points, POINTS_LIMIT), window: this.#window() };
  }
}
