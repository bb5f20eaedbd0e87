// A against B: what each of the two runs brought, on a common clock that starts with decoding, and the verdict.

import { bytes, number } from "./format.js";

/** Points kept of a curve; a longer one keeps every other point. */
export const CURVE_LIMIT = 1000;

/** One side's run, from its events. */
export class Side {
  facts = null;
  status = "waiting";
  text = "";
  ids = [];
  tokens = 0;
  curve = []; // [ns since decoding began, tokens so far]
  moved = 0; // knobs that a person moved meanwhile
  #start = null;
  #latest = [0, 0];

  constructor(name, label) {
    Object.assign(this, { name, label });
  }

  add(event) {
    if (event.kind === "run_start") {
      this.facts = event;
      this.status = "running";
    } else if (event.kind === "phase" && event.phase === "decode") {
      this.#start = event.t;
    } else if (event.kind === "round") {
      this.#round(event);
    } else if (event.kind === "knob") {
      this.moved++;
    } else if (event.kind === "run_end") {
      this.status = event.status;
    }
  }

  #round(event) {
    this.#start ??= event.start;
    this.tokens += event.tokens.length;
    if (event.sequence === 0) {
      this.text += event.tokens.map((token) => token.text).join("");
      this.ids.push(...event.tokens.map((token) => token.id));
    }
    this.#latest = [event.t - this.#start, this.tokens];
    this.curve.push(this.#latest);
    if (this.curve.length > CURVE_LIMIT) this.curve = this.curve.filter((_, i) => i % 2);
  }

  /** Tokens a second from the beginning of decoding to the end of the last round. */
  get rate() {
    const [ns, tokens] = this.#latest;
    return ns > 0 ? tokens / (ns / 1e9) : null;
  }

  get seconds() {
    return this.#latest[0] / 1e9;
  }

  get over() {
    return this.status === "finished";
  }
}

/** The index of the first token that differs; null when one list is the other. */
export function firstDifference(one, other) {
  const most = Math.max(one.length, other.length);
  for (let i = 0; i < most; i++) if (one[i] !== other[i]) return i;
  return null;
}

/** Whether both had the same fast memory; slots are whole, so up to one slot in each layer may lack. */
export function memoryWords(a, b) {
  const [one, other] = [a, b].map(({ facts }) => facts.memory.total);
  const slot = Math.max(...[a, b].map(({ facts }) => facts.memory.cache / Math.max(1, facts.slots_per_layer)));
  const words = one === other ? `${bytes(one)} each` : `A ${bytes(one)}, B ${bytes(other)}`;
  if (Math.abs(one - other) < slot) return `Equal memory: ${words}${one === other ? "" : ", to the nearest slot"}.`;
  return `Not equal memory: ${words}.`;
}

/** Both texts in a sentence. */
export function textWords(a, b) {
  const at = firstDifference(a.ids, b.ids);
  const { temperature, dtype } = a.facts.config;
  const exact = temperature === 0 && dtype === "float32";
  if (at === null) return exact ? "The texts are identical ✓ (temperature 0, float32: they must be)." : "The texts are identical ✓.";
  const why = temperature > 0 ? "at this temperature each run draws its own" : dtype === "float32" ? "at temperature 0 in float32 they must not" : "in bfloat16 near ties may fall either way";
  return `The texts differ from token ${at + 1} on: ${why}.`;
}

/** The verdict, once both have finished. */
export function verdict(a, b) {
  const [fast, slow] = b.rate >= a.rate ? [b, a] : [a, b];
  const ratio = fast.rate / slow.rate;
  const rates = `(${number(fast.rate)} against ${number(slow.rate)} tokens/s, both measured)`;
  const said = ratio < 1.02 ? `A and B are equally fast ${rates}` : `${fast.name} is ${ratio.toFixed(2)} times as fast as ${slow.name} ${rates}`;
  const disturbed = a.moved + b.moved ? " A knob was moved meanwhile, so they had not the same chance." : "";
  return `${said}. ${textWords(a, b)} ${memoryWords(a, b)}${disturbed}`;
}
