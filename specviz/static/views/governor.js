// Why this draft length: k over rounds, the reasons in words, and where a person's knob took effect.

import { el, legend } from "../dom.js";
import { spaced, value } from "../format.js";
import { createPanel } from "../panel.js";
import { Plot, knobMarks, rings } from "../plots.js";
import { roundsOf } from "../selection.js";
import { colours } from "../theme.js";

const REASONS = 5;

export function createGovernor({ state, plotter, selection, wake }) {
  const panel = createPanel({
    id: "governor",
    title: "Governor",
    question: "Why this draft length?",
    table: () => ({
      head: ["round", "k", "prefetch", "who", "reason"],
      rows: (state.figures?.governor.series ?? []).map((c) => [c.round, c.k, c.prefetch ? "yes" : "no", who(c), c.reason]),
      choose: ([round]) => selection.choose({ kind: "round", round }),
    }),
  });
  const plot = new Plot({
    label: "Draft length by round", height: 210, plotter,
    figure: () => governorFigure(state.figures, panel.root, selection.current && roundsOf(selection.current, state.scene)),
    onClick: ({ x }) => selection.choose({ kind: "round", round: x }),
  });
  selection.subscribe(() => {
    plot.invalidate(true);
    wake();
  });
  const list = el("ol", { class: "sv-reasons", "aria-label": "The latest reasons" });
  panel.body.append(el("div", { class: "sv-pair sv-pair-wide" }, el("div", {}, plot.node, legend([
    ["sv-mark-k", "draft length"], ["sv-mark-probe", "a probe"], ["sv-lane-knob", "a knob took effect"],
  ])), list));
  let shown = null;

  function draw({ governor, knobs }) {
    const { latest } = governor;
    panel.say(latest ? `${words(latest)}.`.replace("..", ".") : "The first choice comes with the first round.");
    plot.invalidate();
    const notes = recent(governor.series, knobs);
    const key = JSON.stringify(notes);
    if (key === shown) return;
    shown = key;
    list.replaceChildren(...notes.map(([round, text, kind]) =>
      el("li", { class: `sv-reason sv-reason-${kind}` }, el("b", { text: `Round ${round}` }), el("span", { text }))));
  }

  return { root: panel.root, draw, reset: () => (shown = null), refreshTable: panel.refreshTable };
}

/** Who chose, and why. Most reasons name the k that was chosen: it is not said twice, nor is who moved it by hand. */
export function words({ k, reason, ...choice }, chosen = `k = ${k}`) {
  const own = new RegExp(`\\bk = ${k}\\b`);
  const why = spaced(reason.replace(/^probing /, ""));
  if (!own.test(why)) return `${chosen}, ${who(choice)}: ${why}`;
  const said = why.replace(own, chosen);
  if (!choice.auto && !choice.probing) return said;
  return `${choice.probing ? "A probe" : "The governor"}: ${said}`;
}

const who = (choice) => (choice.probing ? "a probe" : choice.auto ? "the governor" : "by hand");

/** A change leads with what it changed: k = 8 → 3. */
export const changed = (choice, before) =>
  words(choice, before && before.k !== choice.k ? `k = ${before.k} → ${choice.k}` : undefined);

/** The latest changes of k or of a knob, newest first; rounds that only repeat a choice say nothing new. */
function recent(series, knobs) {
  const notes = series
    .filter((choice, i) => i === 0 || ["k", "prefetch", "auto"].some((key) => choice[key] !== series[i - 1][key]))
    .map((choice, i, all) => [choice.round, changed(choice, all[i - 1]), choice.auto ? "auto" : "hand"]);
  const moved = knobs.map((knob) => [knob.round, `${knob.name}: ${value(knob.old)} → ${value(knob.new)}`, "knob"]);
  return [...notes.slice(-REASONS), ...moved.slice(-REASONS)].sort((a, b) => b[0] - a[0]).slice(0, REASONS);
}

function governorFigure({ governor, knobs }, node, rounds) {
  const looks = colours(node);
  const { series } = governor;
  const chosen = series.filter((choice) => rounds?.has(choice.round));
  const last = series.slice(-1).map((choice) => ({ ...choice, round: choice.round + 1 }));
  const probes = series.filter((choice) => choice.probing);
  const marks = (name, choices, marker) => ({
    name, type: "scatter", mode: "markers", x: choices.map((c) => c.round), y: choices.map((c) => c.k), marker,
    hovertemplate: "round %{x}: k = %{y}<extra></extra>",
  });
  return {
    data: [
      {
        // The last choice holds for a round, too.
        name: "k", type: "scatter", mode: "lines", x: [...series, ...last].map((c) => c.round), y: [...series, ...last].map((c) => c.k),
        line: { shape: "hv", color: looks.draft, width: 2.5 }, hovertemplate: "round %{x}: k = %{y}<extra></extra>",
      },
      marks("probe", probes, { color: looks.corrected, size: 7, symbol: "diamond" }),
      rings(looks, chosen.map((c) => c.round), chosen.map((c) => c.k)),
    ],
    layout: {
      showlegend: false,
      xaxis: { title: { text: "round" }, ...(series.length < 12 ? { dtick: 1 } : {}) },
      yaxis: { title: { text: "draft length k" }, dtick: 2, range: [-0.4, Math.max(4, ...series.map((c) => c.k)) + 0.8] },
      ...knobMarks(node, knobs, (knob) => knob.round),
    },
  };
}
