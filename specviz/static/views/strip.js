// The text as it came: which words were free. Rejected drafts have a lane of their own, so that the text
// itself, selected and copied, is exactly the model's.

import { button, el, setText } from "../dom.js";
import { integer, percent, plural } from "../format.js";
import { createPanel } from "../panel.js";
import { holdsToken, roundsOf } from "../selection.js";
import { createDetail } from "./detail.js";

const LEGEND = [
  ["accepted", "accepted drafts", "drafted, and what the target would have said"],
  ["bonus", "bonus", "added by the target when every draft token was accepted"],
  ["corrected", "corrected", "the target's own token in place of the first rejected one"],
  ["plain", "plain", "decoded without a draft"],
  ["rejected", "rejected", "drafted and thrown away; never part of the text"],
];
const REJECTED_ROUNDS = 200;

/** The token strip; `selection` is told which token is looked at or chosen. */
export function createStrip({ state, selection }) {
  const panel = createPanel({
    id: "tokens",
    title: "Tokens",
    question: "Which words came free?",
    table: () => tokenTable(state.scene),
  });
  const text = el("div", { class: "sv-text", role: "group", "aria-label": "Generated text", data: { colour: "on" } });
  const lane = el("div", { class: "sv-drafts", role: "group", "aria-label": "Rejected draft tokens" });
  const rejected = el("div", { class: "sv-rejected-lane" }, lane);
  const detail = createDetail();
  const counts = {};
  const legend = el("div", { class: "sv-legend" }, ...LEGEND.map(([name, label, title]) => {
    counts[name] = el("b", { text: "0" });
    return el("span", { class: "sv-key", title }, el("i", { class: `sv-token sv-${name}`, text: "ab" }), label, counts[name]);
  }));
  panel.body.append(legend, el("div", { class: "sv-strip" }, el("div", { class: "sv-strip-main" }, text, rejected), detail.root));
  panel.toggle.before(
    button("Colours", "Colour the text by the state of its tokens", (event) => {
      const on = flip(event.currentTarget);
      text.dataset.colour = on ? "on" : "off";
    }, true),
    button("Rejected lane", "Show the draft tokens that were thrown away", (event) => {
      rejected.hidden = !flip(event.currentTarget);
    }, true),
  );
  let drawn = [];
  let paragraphs = [];
  let drafts = { count: 0, last: null };
  const boxes = [text, lane];
  for (const box of boxes) follow(box, selection);
  selection.subscribe(({ current, chosen, from }) => {
    if (current?.kind === "token") detail.show(current.token);
    else if (!current && !selection.from) detail.show(null);
    const nodes = boxes.flatMap((box) => [...box.querySelectorAll(".sv-token")]);
    link(nodes);
    if (chosen && from !== "tokens") boxes.forEach(bringIntoSight);
  });

  /** Mark those of the nodes whose tokens belong to what is chosen. */
  function link(nodes) {
    const { current, chosen } = selection;
    const rounds = current && roundsOf(current, state.scene);
    for (const node of nodes) {
      const held = current !== null && holdsToken(current, node.token, rounds);
      node.classList.toggle("sv-current", held && current.kind === "token");
      node.classList.toggle("sv-linked", held && chosen && current.kind !== "token");
    }
  }

  function draw(figures) {
    const { scene } = state;
    const stick = atEnd(text);
    scene.sequences.forEach((tokens, sequence) => {
      if (!paragraphs[sequence]) {
        paragraphs[sequence] = el("p", { class: "sv-sequence", data: { label: `sequence ${sequence + 1}` } });
        paragraphs[sequence].classList.toggle("sv-many", scene.sequences.length > 1);
        text.append(paragraphs[sequence]);
        drawn[sequence] = 0;
      }
      if (drawn[sequence] < tokens.length) {
        const nodes = tokens.slice(drawn[sequence]).map(tokenNode);
        if (selection.chosen) link(nodes);
        paragraphs[sequence].append(...nodes);
        drawn[sequence] = tokens.length;
      }
    });
    if (!text.querySelector('[tabindex="0"]')) text.querySelector(".sv-token")?.setAttribute("tabindex", "0");
    if (stick) text.scrollTop = text.scrollHeight;
    drawRejected(scene.drafts);
    const { states, rejected, unreached } = figures.acceptance;
    for (const [name] of LEGEND) setText(counts[name], integer(name === "rejected" ? rejected + unreached : states[name]));
    panel.say(sentence(figures.acceptance));
  }

  function drawRejected(all) {
    if (all.length === drafts.count && all[all.length - 1] === drafts.last) return;
    const from = all.lastIndexOf(drafts.last) + 1;
    const stick = atEnd(lane);
    lane.append(...all.slice(from).map((draft) =>
      el("span", { class: "sv-draft" }, el("small", { text: `round ${draft.round}` }), ...draft.tokens.map(tokenNode)),
    ));
    while (lane.childElementCount > REJECTED_ROUNDS) lane.firstElementChild.remove();
    if (!lane.querySelector('[tabindex="0"]')) lane.querySelector(".sv-token")?.setAttribute("tabindex", "0");
    if (stick) lane.scrollTop = lane.scrollHeight;
    drafts = { count: all.length, last: all[all.length - 1] ?? null };
  }

  function reset() {
    drawn = [];
    paragraphs = [];
    drafts = { count: 0, last: null };
    text.replaceChildren();
    lane.replaceChildren();
    detail.show(null);
  }

  return { root: panel.root, draw, reset, refreshTable: panel.refreshTable };
}

const flip = (node) => {
  const on = node.getAttribute("aria-pressed") !== "true";
  node.setAttribute("aria-pressed", String(on));
  return on;
};

/** Scroll the box, and never the page, to its first token that belongs to what is chosen. */
function bringIntoSight(box) {
  const node = box.querySelector(".sv-linked, .sv-current");
  if (!node) return;
  const by = node.getBoundingClientRect().top - box.getBoundingClientRect().top;
  if (by < 0 || by > box.clientHeight - 30) box.scrollTop += by - box.clientHeight / 3;
}

const atEnd = (node) => node.scrollHeight - node.scrollTop - node.clientHeight < 24;

/** One token as a span whose text is exactly the token's; marks for line ends come from the style sheet. */
function tokenNode(token) {
  const classes = ["sv-token", `sv-${token.state}`];
  if (token.text === "") classes.push("sv-part");
  if (/^\s*\n\s*$/.test(token.text)) classes.push("sv-newline");
  if (token.state === "rejected" && !token.verified) classes.push("sv-unreached");
  const node = el("span", { class: classes.join(" "), tabindex: "-1", text: token.text });
  node.token = token;
  return node;
}

/** Hover and focus look at a token of `box`, click, tap and Enter choose it; only one token is in the tab order. */
function follow(box, selection) {
  const at = (event) => event.target.closest?.(".sv-token")?.token;
  box.addEventListener("pointerover", (event) => at(event) && selection.look({ kind: "token", token: at(event) }));
  box.addEventListener("click", (event) => at(event) && selection.choose({ kind: "token", token: at(event) }, "tokens"));
  box.addEventListener("focusin", (event) => {
    const node = event.target.closest?.(".sv-token");
    if (!node) return;
    box.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    node.setAttribute("tabindex", "0");
    node.setAttribute("aria-label", describe(node.token));
    selection.look({ kind: "token", token: node.token });
  });
  box.addEventListener("keydown", (event) => {
    const nodes = [...box.querySelectorAll(".sv-token")];
    const at = nodes.indexOf(document.activeElement);
    if (at < 0) return;
    if (event.key === "Enter") selection.choose({ kind: "token", token: nodes[at].token }, "tokens");
    const to = { ArrowRight: at + 1, ArrowDown: at + 10, ArrowLeft: at - 1, ArrowUp: at - 10, Home: 0, End: nodes.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    nodes[Math.max(0, Math.min(to, nodes.length - 1))].focus();
  });
}

function describe(token) {
  const where = token.round === null ? "" : `, round ${token.round}, position ${token.position + 1}`;
  const odds = typeof token.p_target === "number" ? `, target probability ${percent(token.p_target)}` : "";
  return `“${token.text}”, ${token.state}${where}${odds}`;
}

function sentence({ emitted, accepted, rounds, speculative_rounds: drafting }) {
  if (!emitted) return "Text appears here as it is generated.";
  if (!drafting) return `${plural(emitted, "token")} in ${plural(rounds, "round")}: one each, as without speculation.`;
  const free = accepted / emitted;
  return `${plural(emitted, "token")} in ${plural(rounds, "round")}: ${percent(free)} of them were accepted drafts, verified together in one pass.`;
}

function tokenTable(scene) {
  const rows = scene.sequences.flatMap((tokens, sequence) => tokens.map((token) => [
    sequence + 1, token.round, token.round === null ? null : token.position + 1, JSON.stringify(token.text), token.state,
    token.p_target?.toFixed(4), token.p_draft?.toFixed(4),
  ]));
  return { head: ["sequence", "round", "position", "text", "state", "p(target)", "p(draft)"], rows };
}
