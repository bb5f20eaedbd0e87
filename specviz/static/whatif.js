// What the what-if panel asks the server, and what its answer says in words. No model is loaded for it.

import { number, spaced } from "./format.js";

const BASE = new URL("../whatif/", import.meta.url);
/** Policies without speculation, and with it. */
export const PLAIN = ["on demand", "streamed, no draft"];
export const DRAFTING = ["MoE-SpeQ", "SpecMoEOff"];

/** An answer of the server; throws its one line when it refuses. */
export async function ask(part, query = {}, signal = undefined) {
  const url = new URL(part, BASE);
  for (const [name, value] of Object.entries(query)) if (value !== "" && value !== null) url.searchParams.set(name, value);
  const answer = await fetch(url, { signal });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `the server answered ${answer.status}`);
  return body;
}

const fastest = (policies, names) => policies
  .filter((policy) => names.includes(policy.policy) && policy.tokens_per_second !== null)
  .reduce((best, policy) => (policy.tokens_per_second > (best?.tokens_per_second ?? 0) ? policy : best), null);

/** The fastest policy without speculation and the fastest with it; null where none fits. */
export const contest = ({ policies }) => ({ plain: fastest(policies, PLAIN), drafting: fastest(policies, DRAFTING) });

/** The verdict in a sentence or two. */
export function verdict(report) {
  const { plain, drafting } = contest(report);
  const where = `${report.model} on ${report.hardware}`;
  if (!plain && !drafting) return `${where}: nothing fits. ${report.policies[0].reason}.`;
  if (!drafting) return `${where}: ${number(plain.tokens_per_second)} tokens/s without speculation; no kind of speculation fits into its memory.`;
  if (!plain) return `${where}: ${number(drafting.tokens_per_second)} tokens/s with ${drafting.policy}; nothing else fits.`;
  const ratio = drafting.tokens_per_second / plain.tokens_per_second;
  const pays = ratio > 1.02 ? `speculation pays, ${number(ratio)} times as fast` : ratio < 0.98 ? `speculation does not pay, ${number(ratio)} times as fast` : "speculation changes nothing";
  const best = ratio >= 1 ? drafting : plain;
  return `${where}: ${number(drafting.tokens_per_second)} tokens/s with ${drafting.policy}, ${number(plain.tokens_per_second)} without a draft (${plain.policy}): ${pays}. What binds: ${spaced(best.reason.replace(/^\w+: /, ""))}.`;
}
