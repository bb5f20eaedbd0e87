// A against B: curves over a common clock, the texts' difference, and a verdict.

import { el, legend, setText } from "../dom.js";
import { bytes, clock, number } from "../format.js";
import { createPanel } from "../panel.js";
import { Plot } from "../plots.js";
import { Side, firstDifference, verdict } from "../compare.js";
import { colours } from "../theme.js";

const STYLES = { A: ["accepted", "solid"], B: ["demand", "dash"] };

/** `begin(told)` starts a side ({side, label, first}) or, with null, says that an ordinary run starts; `add(event)`. */
export function createCompare({ plotter, wake }) {
  let sides = {};
  let current = null;
  let shown = "";
  const panel = createPanel({
    id: "compare",
    title: "Compare",
    question: "A against B: which is faster, and is the text the same?",
    table: () => sideTable(sides),
  });
  const settings = el("dl", { class: "sv-sides" });
  const plot = new Plot({
    label: "Tokens so far over seconds since decoding began, A and B", height: 230, plotter,
    figure: () => figure(sides, colours(panel.root)),
  });
  const texts = el("div", { class: "sv-diff" });
  const picture = el("div", {}, settings, plot.node, legend([["sv-mark-a", "A"], ["sv-mark-b", "B"]]), texts);
  picture.hidden = true;
  panel.body.append(picture);
  panel.say(HINT);

  function begin(told) {
    current = null;
    if (!told) return;
    if (told.first) sides = {};
    picture.hidden = false;
    current = sides[told.side] = new Side(told.side, told.label);
    list();
  }

  /** A side that was over before the page was reloaded; nothing when its events are gone. */
  function recall(name, label, events) {
    if (!current || !events.length) return;
    sides[name] = new Side(name, label);
    for (const event of events) sides[name].add(event);
    list();
  }

  function list() {
    settings.replaceChildren(...present(sides).map(({ name, label }) => el("div", {}, el("dt", { text: name }), el("dd", { text: label }))));
    changed();
  }

  function changed() {
    plot.invalidate();
    wake(true);
  }

  function add(event) {
    if (!current) return;
    current.add(event);
    if (event.kind === "run_end") changed();
  }

  function draw() {
    if (current) plot.invalidate();
    panel.say(sentence(sides));
    const key = present(sides).map((side) => side.name + side.status).join();
    if (key === shown) return;
    shown = key;
    texts.replaceChildren(...(sides.A?.over && sides.B?.over ? difference(sides.A, sides.B) : []));
  }

  return { root: panel.root, begin, recall, add, draw, refreshTable: panel.refreshTable };
}

const HINT = "Nothing was compared yet: open “Compare A with B” among the controls, and press Compare.";
const present = (sides) => ["A", "B"].map((name) => sides[name]).filter(Boolean);

function sentence(sides) {
  const both = present(sides);
  if (!both.length) return HINT;
  if (both.length === 2 && both.every((side) => side.over)) return verdict(sides.A, sides.B);
  const ended = both.find((side) => ["stopped", "failed"].includes(side.status));
  if (ended) return `${ended.name} was ${ended.status}: there is nothing to compare.`;
  return both.map((side) => `${side.name}: ${side.over ? "finished" : side.status}, ${number(side.rate)} tokens/s`).join("; ") + ".";
}

function figure(sides, looks) {
  const data = present(sides).map(({ name, curve }) => ({
    name, type: "scatter", mode: "lines", x: [0, ...curve.map(([ns]) => ns / 1e9)], y: [0, ...curve.map(([, tokens]) => tokens)],
    line: { color: looks[STYLES[name][0]], dash: STYLES[name][1], width: 2.5 },
    hovertemplate: `${name}: %{y} tokens after %{x:.2f} s<extra></extra>`,
  }));
  return {
    data,
    layout: {
      showlegend: false,
      xaxis: { title: { text: "seconds since decoding began" }, rangemode: "tozero" },
      yaxis: { title: { text: "tokens so far" }, rangemode: "tozero" },
    },
  };
}

/** What both texts share, and how each goes on. */
function difference(a, b) {
  const at = firstDifference(a.ids, b.ids);
  if (at === null) return [el("p", {}, el("b", { text: "identical ✓ " }), el("span", { class: "sv-diff-text", text: a.text }))];
  let shared = 0;
  while (shared < Math.min(a.text.length, b.text.length) && a.text[shared] === b.text[shared]) shared++;
  if (/[\ud800-\udbff]/.test(a.text[shared - 1] ?? "")) shared--; // half of a character
  return [a, b].map(({ name, text }) => el("p", {}, el("b", { text: `${name} ` }),
    el("span", { class: "sv-diff-text", text: text.slice(0, shared) }), el("mark", { class: "sv-diff-text", text: text.slice(shared) })));
}

function sideTable(sides) {
  const rows = present(sides).map((side) => {
    const memory = side.facts?.memory ?? {};
    return [side.name, side.label, side.status, side.tokens, clock(side.seconds), number(side.rate), bytes(memory.total), bytes(memory.draft), bytes(memory.cache)];
  });
  return { head: ["side", "settings", "status", "tokens", "decoding", "tokens/s", "memory", "draft", "cache"], rows };
}
