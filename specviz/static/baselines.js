// Measured baselines: finished runs without a draft, kept by what was asked, so that a run of the same prompt
// and settings with a draft can be held against one. A baseline is never estimated.

const KEPT = 20;

export class Baselines {
  #runs = new Map();

  /** Keep a run that has finished, if nothing was drafted and no knob was moved. Returns whether it was kept. */
  note(figures, text) {
    const { run, acceptance, facts, time, knobs } = figures;
    if (run.status !== "finished" || !facts || acceptance.drafted || !acceptance.emitted || knobs.length) return false;
    this.#runs.set(keyOf(facts, text), { rate: time.mean_rate, memory: facts.memory.total, slots: facts.slots_per_layer });
    if (this.#runs.size > KEPT) this.#runs.delete(this.#runs.keys().next().value);
    return true;
  }

  /** {rate (tokens/s), memory (bytes), slots} of the same request without a draft, or null. */
  find(facts, text) {
    return (facts && this.#runs.get(keyOf(facts, text))) ?? null;
  }
}

/** Everything that must be equal for two speeds to be compared; memory is told beside them. */
function keyOf({ model, machine, link, config }, text) {
  const { max_new_tokens, temperature, top_k, top_p, seed, dtype, chat, link_gbps, link_latency_us } = config;
  const request = { max_new_tokens, temperature, top_k, top_p, seed, dtype, chat };
  const pace = link.emulated ? [link.preset ?? link_gbps, link_latency_us] : [];
  return JSON.stringify([text, model.name, machine.cpu, machine.device, link.kind, pace, request]);
}

/** Less than this is noise of the machine: two runs of the same settings differ by as much. */
const NOISE = 0.03;

/** Does it pay? In words, and whether that is `known`: "measured" or "predicted". `ratio`: speed with / without a draft. */
export function answer(ratio, known) {
  if (ratio > 1 + NOISE) return `It pays, ${known}`;
  return ratio < 1 - NOISE ? `It does not pay, ${known}` : `It makes no difference, ${known}`;
}

/** The words of the speed panel: measured against measured. */
export function baselineWords(baseline, facts, rate, format, bytes) {
  const ratio = rate / baseline.rate;
  const equal = baseline.memory === facts.memory.total;
  const memory = equal ? `the same memory, ${bytes(baseline.memory)}` : `with ${bytes(baseline.memory)} of memory instead of ${bytes(facts.memory.total)}`;
  return `${answer(ratio, "measured")}: ${ratio.toFixed(2)} × the ${format(baseline.rate)} tokens/s of the same prompt without a draft (${memory}).`;
}
