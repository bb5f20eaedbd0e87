// What the pictures need beyond figures: the tokens of the text, and the slices of the timeline.

import { push } from "./reducers.js";

export const TOKEN_LIMIT = 8192;
export const SLICE_LIMIT = 6000;
export const TRANSFER_LIMIT = 3000;
export const ROUND_LIMIT = 1500;

/** The prompts of a run, as one text. */
export const promptText = ({ sequences }) =>
  JSON.stringify(sequences.map((tokens) => tokens.filter(({ state }) => state === "prompt").map(({ text }) => text).join("")));

/** The things seen in one run. Lists only grow at their end; `version` counts changes. */
export class Scene {
  version = 0;
  sequences = [];
  drafts = []; // rejected draft tokens, one list a round: {round, sequence, after, tokens}
  slices = [];
  stalls = [];
  transfers = [];
  rounds = [];
  knobs = [];
  phase = null; // the latest phase event: in a queue, its detail says how many are ahead
  connection = null; // how the engine's machine is heard; null for an engine in the server itself
  #transfers = new Map();
  #fates = new Map();

  add(event) {
    const handler = this[`_${event.kind}`];
    if (!handler) return;
    handler.call(this, event);
    this.version++;
  }

  _run_start(event) {
    this.sequences = event.prompts.map((prompt) =>
      prompt.map((token) => ({ ...token, state: "prompt", round: null, experts: [], alternatives: [] })),
    );
  }

  _round(event) {
    const text = (this.sequences[event.sequence] ??= []);
    for (const token of event.tokens) {
      if (text.length < TOKEN_LIMIT) text.push({ ...token, round: event.round, sequence: event.sequence });
    }
    if (event.rejected.length) {
      const tokens = event.rejected.map((token) => ({ ...token, state: "rejected", round: event.round }));
      push(this.drafts, { round: event.round, sequence: event.sequence, tokens }, ROUND_LIMIT);
    }
    if (this.rounds[this.rounds.length - 1]?.round !== event.round) {
      const { round, k, accepted, start, t } = event;
      push(this.rounds, { round, k, accepted, start, end: t, tokens: event.tokens.length }, ROUND_LIMIT);
    }
  }

  _compute(event) {
    const lane = event.lane === "draft" ? "draft" : event.op === "experts" ? "experts" : "attention";
    const { lane: pass, op, layer, rows, round, start, end } = event;
    push(this.slices, { lane, pass, op, layer, rows, round, start, end }, SLICE_LIMIT);
  }

  _stall(event) {
    push(this.stalls, { round: event.round, layer: event.layer, start: event.start, end: event.end }, SLICE_LIMIT);
  }

  _transfer(event) {
    const fate = this.#fates.get(event.id);
    const transfer = { ...event, lane: event.cause, outcome: fate?.outcome ?? null, fated: fate?.t ?? null };
    push(this.transfers, transfer, TRANSFER_LIMIT);
    if (fate) {
      this.#fates.delete(event.id);
    } else {
      this.#transfers.set(event.id, transfer);
      if (this.#transfers.size > TRANSFER_LIMIT) this.#transfers.delete(this.#transfers.keys().next().value);
    }
  }

  _settled(event) {
    const transfer = this.#transfers.get(event.id);
    if (transfer) {
      transfer.outcome = event.outcome;
      transfer.fated = event.t;
      this.#transfers.delete(event.id);
    } else {
      this.#fates.set(event.id, event);
      if (this.#fates.size > TRANSFER_LIMIT) this.#fates.delete(this.#fates.keys().next().value);
    }
  }

  _knob(event) {
    push(this.knobs, event, ROUND_LIMIT);
  }

  _phase(event) {
    this.phase = event;
  }

  _connection(event) {
    this.connection = event;
  }

  /** A finished run has no connection to speak of. */
  _run_end() {
    this.connection = null;
  }
}
