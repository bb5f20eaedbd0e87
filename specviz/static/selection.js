// What is chosen on the page: one thing, chosen in any view and shown in all. Views subscribe and ask what belongs to it.
//
//   {kind: "token", token}              one token of the text, or a rejected draft
//   {kind: "round", round}              all that happened in a round
//   {kind: "expert", layer, expert}     with `round`, only there
//   {kind: "position", position}        the tokens at one place of their draft, from 0
//   {kind: "length", tokens}            the rounds that brought so many tokens

import { plural } from "./format.js";

/** The store. Looking (hover, focus) shows for a moment; choosing (click, Enter) stays until Escape. */
export class Selection {
  current = null;
  chosen = false;
  /** Where it was chosen; that view need not bring it into sight. */
  from = null;
  #listeners = new Set();

  subscribe(listener) {
    this.#listeners.add(listener);
  }

  look(what) {
    if (!this.chosen) this.#set(what, false, null);
  }

  /** Choose; the same once more lets go. */
  choose(what, from = null) {
    if (this.chosen && same(this.current, what)) this.clear();
    else this.#set(what, true, from);
  }

  clear() {
    this.#set(null, false, null);
  }

  #set(current, chosen, from) {
    if (same(current, this.current) && chosen === this.chosen) return;
    Object.assign(this, { current, chosen, from });
    for (const listener of this.#listeners) listener(this);
  }
}

const same = (one, other) =>
  one === other || (one !== null && other !== null && Object.keys({ ...one, ...other }).every((key) => one[key] === other[key]));

const uses = (token, layer, expert) => token.experts?.[layer]?.includes(expert) ?? false;
const drafted = (token) => token.state === "accepted" || token.state === "corrected" || token.state === "rejected";

/** The numbers of the rounds that belong to it; null for all (an expert may be used in any). */
export function roundsOf(what, scene) {
  if (what.kind === "token") return new Set(what.token.round === null ? [] : [what.token.round]);
  if (what.kind === "length") return new Set(scene.rounds.filter((round) => round.tokens === what.tokens).map(({ round }) => round));
  return what.round === undefined ? null : new Set([what.round]);
}

/** Whether a token belongs to it. `rounds` is that of `roundsOf`, asked once for all tokens. */
export function holdsToken(what, token, rounds) {
  if (what.kind === "token") return token === what.token;
  if (token.round === null || (rounds && !rounds.has(token.round))) return false;
  if (what.kind === "expert") return uses(token, what.layer, what.expert);
  if (what.kind === "position") return drafted(token) && token.position === what.position;
  return true;
}

export function holdsTransfer(what, transfer, rounds) {
  if (rounds && !rounds.has(transfer.round)) return false;
  if (what.kind === "token") return uses(what.token, transfer.layer, transfer.expert);
  if (what.kind === "expert") return transfer.layer === what.layer && transfer.expert === what.expert;
  return what.kind !== "position";
}

/** All tokens that belong to it, of the text and of the rejected drafts. */
export function tokensOf(what, scene) {
  const rounds = roundsOf(what, scene);
  const all = [...scene.sequences.flat(), ...scene.drafts.flatMap((draft) => draft.tokens)];
  return all.filter((token) => holdsToken(what, token, rounds));
}

/** Its experts, a list a layer, each expert once. */
export function expertsOf(what, scene) {
  if (what.kind === "token") return what.token.experts ?? [];
  const layers = [];
  const note = (layer, expert) => {
    while (layers.length <= layer) layers.push([]);
    if (!layers[layer].includes(expert)) layers[layer].push(expert);
  };
  if (what.kind === "expert") note(what.layer, what.expert);
  else for (const token of tokensOf(what, scene)) token.experts?.forEach((list, layer) => list.forEach((expert) => note(layer, expert)));
  return layers;
}

/** It in a sentence. */
export function describe(what, scene) {
  const rounds = roundsOf(what, scene);
  const moved = scene.transfers.filter((transfer) => holdsTransfer(what, transfer, rounds));
  const early = moved.filter((transfer) => transfer.outcome === "used").length;
  const crossing = moved.length ? `${plural(moved.length, "transfer")}, ${early} in time` : "no transfer";
  if (what.kind === "token") {
    const { text, round, state } = what.token;
    const where = round === null ? "of the prompt" : `${state}, round ${round}`;
    return `Token “${JSON.stringify(text).slice(1, -1)}”: ${where}; its experts: ${crossing} in that round`;
  }
  const tokens = tokensOf(what, scene).filter((token) => token.state !== "rejected").length;
  if (what.kind === "round") return `Round ${what.round}: ${plural(tokens, "token")}, ${crossing}`;
  if (what.kind === "length") return `Rounds of ${plural(what.tokens, "token")}: ${rounds.size} of ${scene.rounds.length}, ${crossing}`;
  if (what.kind === "position") {
    const seen = tokensOf(what, scene);
    const kept = seen.filter((token) => token.state === "accepted").length;
    const thrown = seen.filter((token) => token.state === "rejected" && token.verified).length;
    return `Position ${what.position + 1} of the draft: ${kept} of ${kept + thrown} accepted`;
  }
  const where = what.round === undefined ? "" : ` in round ${what.round}`;
  return `Expert ${what.expert} of layer ${what.layer}${where}: used for ${plural(tokens, "token")}, ${crossing}`;
}
