// The parts of the metrics about tokens, time and control. The same code as specviz/reducers.py;
// tests hold both to equal JSON on the golden files, so the order of float operations matters.

export const WINDOW_ROUNDS = 20;
export const WINDOW_NS = 1e9;
export const SERIES_LIMIT = 1000;

/** part / whole, null where nothing was counted. */
export const ratio = (part, whole) => (whole ? part / whole : null);

/** Append to a list that keeps its last `limit` items. */
export function push(list, item, limit) {
  list.push(item);
  // Cut rarely: shifting one item at a time would move the whole list each time.
  if (list.length > limit * 2) list.splice(0, list.length - limit);
}

/** The last `count` items. */
export const last = (list, count) => list.slice(Math.max(0, list.length - count));

export const pick = (event, keys) => Object.fromEntries(keys.map((key) => [key, event[key]]));

/** Is the draft good here? Counts over rounds; a round of a batch is one round a sequence. */
export class Acceptance {
  rounds = 0;
  speculative = 0;
  drafted = 0;
  verified = 0;
  accepted = 0;
  emitted = 0;
  positions = [];
  histogram = [];
  states = { plain: 0, accepted: 0, corrected: 0, bonus: 0 };
  rejected = 0;
  unreached = 0;
  #recent = [];

  round(event) {
    const { drafted, verified, accepted } = event;
    const emitted = event.tokens.length;
    this.rounds += 1;
    this.speculative += drafted > 0 ? 1 : 0;
    this.drafted += drafted;
    this.verified += verified;
    this.accepted += accepted;
    this.emitted += emitted;
    while (this.positions.length < verified) this.positions.push([0, 0]);
    for (let position = 0; position < verified; position++) {
      this.positions[position][0] += 1;
      this.positions[position][1] += position < accepted ? 1 : 0;
    }
    while (this.histogram.length <= emitted) this.histogram.push(0);
    this.histogram[emitted] += 1;
    for (const token of event.tokens) if (token.state in this.states) this.states[token.state] += 1;
    for (const token of event.rejected) {
      if (token.verified) this.rejected += 1;
      else this.unreached += 1;
    }
    push(this.#recent, [drafted, verified, accepted], WINDOW_ROUNDS);
  }

  toJSON() {
    const recent = last(this.#recent, WINDOW_ROUNDS);
    let drafting = 0;
    let verified = 0;
    let accepted = 0;
    for (const round of recent) {
      drafting += round[0] > 0 ? 1 : 0;
      verified += round[1];
      accepted += round[2];
    }
    return {
      rounds: this.rounds,
      speculative_rounds: this.speculative,
      drafted: this.drafted,
      verified: this.verified,
      accepted: this.accepted,
      emitted: this.emitted,
      cut: this.accepted + this.rounds - this.emitted,
      states: { ...this.states },
      rejected: this.rejected,
      unreached: this.unreached,
      rate: ratio(this.accepted, this.verified),
      mean_length: this.speculative ? 1 + this.accepted / this.speculative : null,
      by_position: this.positions.map(([n, hit]) => ({ verified: n, accepted: hit, rate: hit / n })),
      tokens_per_round: [...this.histogram],
      window: {
        rounds: recent.length,
        rate: ratio(accepted, verified),
        mean_length: drafting ? 1 + accepted / drafting : null,
      },
    };
  }
}

/** Does it pay? Time split and tokens a second. The rounds of a batch share one pass, counted once. */
export class Clock {
  tokens = 0;
  passes = 0;
  draft = 0;
  verify = 0;
  stall = 0;
  start = null;
  end = 0;
  stalls = 0;
  stalled = 0;
  #lastRound = null;
  #recent = [];
  #series = [];

  round(event) {
    if (this.start === null) this.start = event.start;
    this.end = Math.max(this.end, event.t);
    this.tokens += event.tokens.length;
    const fresh = event.round !== this.#lastRound;
    if (fresh) {
      this.passes += 1;
      this.draft += event.draft_end - event.start;
      this.verify += event.verify_end - event.verify_start - event.stall_ns;
      this.stall += event.stall_ns;
      this.#lastRound = event.round;
    }
    this.#recent.push([event.start, event.t, event.tokens.length]);
    let old = 0;
    while (this.#recent[old][1] <= this.end - WINDOW_NS) old++;
    if (old) this.#recent.splice(0, old);
    if (!fresh) this.#series.pop();
    push(this.#series, { round: event.round, t: this.end, rate: this.#rate(), mean: this.#mean() }, SERIES_LIMIT);
  }

  /** Forget what the prefill waited for. */
  beginDecode() {
    this.stalls = this.stalled = 0;
  }

  waited(event) {
    this.stalls += 1;
    this.stalled += event.end - event.start;
  }

  #mean() {
    return ratio(this.tokens * 1e9, this.end - (this.start ?? 0));
  }

  /** Tokens/s in the last second, each round's tokens spread evenly over its time. */
  #rate() {
    const low = Math.max(this.end - WINDOW_NS, this.start ?? 0);
    let tokens = 0;
    for (const [start, end, count] of this.#recent) {
      tokens += end > start ? count * ((end - Math.max(start, low)) / (end - start)) : count;
    }
    return ratio(tokens * 1e9, this.end - low);
  }

  toJSON() {
    const decode = this.start === null ? 0 : this.end - this.start;
    const series = last(this.#series, SERIES_LIMIT);
    const latest = series[series.length - 1];
    return {
      passes: this.passes,
      decode_ns: decode,
      draft_ns: this.draft,
      verify_ns: this.verify,
      stall_ns: this.stall,
      other_ns: decode - this.draft - this.verify - this.stall,
      stall_share: ratio(this.stall, decode),
      stalls: this.stalls,
      stalled_ns: this.stalled,
      rate: latest ? latest.rate : null,
      mean_rate: latest ? latest.mean : null,
      series,
    };
  }
}

const CHOICE = ["round", "t", "k", "auto", "probing", "reason"];
const CURVES = ["expected_tokens", "predicted_seconds", "predicted_rate"];
const KNOB = ["round", "t", "name", "old", "new", "version"];

/** Why this k? The governor's choices, and the knobs that a person moved. */
export class Control {
  #choices = [];
  #knobs = [];
  #latest = null;

  choice(event) {
    // Runs recorded before the governor chose it do not tell whether there was prefetching.
    const chosen = { ...pick(event, CHOICE), prefetch: event.prefetch ?? false };
    push(this.#choices, chosen, SERIES_LIMIT);
    this.#latest = { ...chosen, ...pick(event, CURVES) };
  }

  knob(event) {
    push(this.#knobs, pick(event, KNOB), SERIES_LIMIT);
  }

  governorJSON() {
    return { latest: this.#latest, series: last(this.#choices, SERIES_LIMIT) };
  }

  knobsJSON() {
    return last(this.#knobs, SERIES_LIMIT);
  }
}
