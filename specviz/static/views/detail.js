// Everything known about one token: where it came from, how likely it was, what else was likely, its experts.

import { el } from "../dom.js";
import { probability } from "../format.js";

const WORDS = {
  prompt: "prompt token",
  plain: "plain: decoded without a draft",
  accepted: "accepted draft token",
  corrected: "corrected: the target's token after a rejection",
  bonus: "bonus: the target's token after a fully accepted draft",
  rejected: "rejected draft token",
};

/** The box beside the text; `show(token)` fills it, `show(null)` says what it is for. */
export function createDetail() {
  // It scrolls where it is low, so keys must reach it.
  const root = el("aside", { class: "sv-detail", tabindex: "0", "aria-label": "The token looked at" });

  function show(token) {
    if (!token) {
      root.replaceChildren(el("p", { class: "sv-hint", text: "Hover, tap or use the arrow keys on a token to see where it came from." }));
      return;
    }
    const unreached = token.state === "rejected" && !token.verified ? ", never looked at: it stood behind a rejected one" : "";
    root.replaceChildren(
      el("div", { class: "sv-detail-text", text: JSON.stringify(token.text).slice(1, -1) || "(part of a character)" }),
      el("div", { class: "sv-detail-state" }, el("i", { class: `sv-swatch sv-fill-${token.state}` }), WORDS[token.state] + unreached),
      ...(token.round === null ? [] : [el("p", { class: "sv-detail-where", text: `Round ${token.round}, position ${token.position + 1} of its chunk` })]),
      ...odds(token),
      ...alternatives(token),
      ...experts(token),
    );
  }

  show(null);
  return { root, show };
}

function bar(label, p, kind) {
  return el(
    "div",
    { class: "sv-odds" },
    el("span", { class: "sv-odds-label", text: label }),
    el("span", { class: "sv-odds-track" }, el("i", { class: `sv-odds-${kind}`, style: `width:${Math.max(0, Math.min(1, p)) * 100}%` })),
    el("span", { class: "sv-odds-value", text: probability(p) }),
  );
}

function odds(token) {
  const rows = [["p(target)", token.p_target, "target"], ["p(draft)", token.p_draft, "draft"]];
  return rows.filter((row) => typeof row[1] === "number").map((row) => bar(...row));
}

function alternatives(token) {
  if (!token.alternatives?.length) return [];
  return [
    el("h4", { text: "The target's likeliest" }),
    ...token.alternatives.slice(0, 5).map(([text, p]) => bar(JSON.stringify(text).slice(1, -1), p, "other")),
  ];
}

function experts(token) {
  if (!token.experts?.length) return [];
  const cells = token.experts.map((list, layer) =>
    el("span", { class: "sv-route" }, el("small", { text: `L${layer}` }), list.join(" ")),
  );
  return [el("h4", { text: "Experts, by layer" }), el("div", { class: "sv-routes" }, ...cells)];
}
