// Does it pay? Tokens a second, and where the time goes.

import { answer, baselineWords } from "../baselines.js";
import { el, legend, setText } from "../dom.js";
import { bytes, duration, number, percent } from "../format.js";
import { createPanel } from "../panel.js";
import { Plot, knobMarks, rings } from "../plots.js";
import { roundsOf } from "../selection.js";
import { promptText } from "../scene.js";
import { colours } from "../theme.js";

const PARTS = [["draft", "draft"], ["verify", "verify"], ["stall", "stall"], ["other", "other"]];

export function createSpeed({ state, plotter, selection, wake }) {
  const panel = createPanel({
    id: "speed",
    title: "Speed",
    question: "Does it pay?",
    table: () => ({
      head: ["round", "at", "tokens/s, last second", "tokens/s, whole run"],
      rows: (state.figures?.time.series ?? []).map((p) => [p.round, duration(p.t), number(p.rate), number(p.mean)]),
      choose: ([round]) => selection.choose({ kind: "round", round }),
    }),
  });
  let baseline = null;
  const plot = new Plot({
    label: "Tokens a second over time", height: 230, plotter,
    figure: () => speedFigure(state.figures, panel.root, selection.current && roundsOf(selection.current, state.scene), baseline),
    onClick: ({ customdata }) => selection.choose({ kind: "round", round: customdata }),
  });
  selection.subscribe(() => {
    plot.invalidate(true);
    wake();
  });
  const bar = el("div", { class: "sv-bar sv-bar-time", role: "img" });
  const parts = Object.fromEntries(PARTS.map(([name]) => [name, el("span", { class: `sv-bar-part sv-time-${name}` })]));
  bar.append(...Object.values(parts));
  const values = {};
  const shares = el("div", { class: "sv-bar-legend" }, ...PARTS.map(([name, label]) => {
    values[name] = el("b", { text: "–" });
    return el("span", { class: "sv-key" }, el("i", { class: `sv-swatch sv-time-${name}` }), label, values[name]);
  }));
  panel.body.append(plot.node, legend([["sv-mark-rate", "last second"], ["sv-mark-mean", "whole run"], ["sv-mark-link", "measured without a draft, where there is one"], ["sv-lane-knob", "a knob took effect"]]), el("h4", { text: "Where the decoding time goes" }), bar, shares);

  function draw({ time, governor, facts, acceptance, run }) {
    for (const [name] of PARTS) {
      const share = time.decode_ns ? time[`${name}_ns`] / time.decode_ns : 0;
      parts[name].style.flexGrow = String(Math.max(0, share));
      setText(values[name], time.decode_ns ? percent(share) : "–");
    }
    bar.setAttribute("aria-label", PARTS.map(([name]) => `${name} ${values[name].textContent}`).join(", "));
    baseline = acceptance.drafted ? state.baselines.find(facts, promptText(state.scene)) : null;
    // The question first: whether it pays.
    const paid = baseline && time.mean_rate
      ? baselineWords(baseline, facts, time.mean_rate, number, bytes) : verdict(time, governor.latest, state.mode !== "recording");
    panel.say(`${paid} ${sentence(time, run)}`.trim());
    plot.invalidate();
  }

  return { root: panel.root, draw, refreshTable: panel.refreshTable };
}

function speedFigure({ time, knobs }, node, rounds, baseline) {
  const looks = colours(node);
  const xs = time.series.map((p) => p.t / 1e9);
  const line = (name, key, style) => ({
    name, type: "scatter", mode: "lines", x: xs, y: time.series.map((p) => p[key]), line: style,
    customdata: time.series.map((p) => p.round),
    hovertemplate: "%{x:.2f} s: %{y:.1f} tokens/s<extra></extra>",
  });
  const chosen = time.series.filter((p) => rounds?.has(p.round));
  const ends = [0, xs.at(-1) ?? 1];
  return {
    data: [
      ...(baseline ? [{
        name: "baseline", type: "scatter", mode: "lines", x: ends, y: [baseline.rate, baseline.rate],
        line: { color: looks.demand, width: 2 }, hovertemplate: "measured without a draft: %{y:.1f} tokens/s<extra></extra>",
      }] : []),
      rings(looks, chosen.map((p) => p.t / 1e9), chosen.map((p) => p.rate), 12),
      line("last second", "rate", { color: looks.accepted, width: 2 }),
      line("whole run", "mean", { color: looks.muted, width: 2, dash: "dash" }),
    ],
    layout: {
      showlegend: false,
      xaxis: { title: { text: "time (s)" }, rangemode: "tozero" },
      yaxis: { title: { text: "tokens/s" }, rangemode: "tozero" },
      ...knobMarks(node, knobs, (knob) => knob.t / 1e9),
    },
  };
}

/** Against what: the same predictions that the governor compares, with the draft and without. */
function verdict(time, latest, live) {
  if (!time.decode_ns || !latest) return "";
  const [plain, ...drafting] = latest.predicted_rate;
  // Where nothing is drafted, the best draft is what plain decoding is held against.
  const k = latest.k || 1 + drafting.indexOf(Math.max(...drafting));
  const now = latest.k ? "" : "Nothing is drafted now (k = 0). ";
  if (!drafting.length) return now.trim();
  const said = answer(drafting[k - 1] / plain, "predicted");
  const sure = live && latest.k ? " “Measure the baseline” makes sure." : "";
  return `${now}${said}: ${number(drafting[k - 1])} tokens/s with k = ${k}, ${number(plain)} without a draft (k = 0).${sure}`;
}

function sentence(time, { sequences, status }) {
  if (!time.decode_ns) return "Speed shows with the first round.";
  const [name, ns] = [["drafting", time.draft_ns], ["verifying", time.verify_ns], ["waiting for experts", time.stall_ns]]
    .reduce((most, item) => (item[1] > most[1] ? item : most));
  const all = sequences > 1 ? `${sequences} sequences together: ` : "";
  // The last second of a run that is over, often a short round, is no answer to how fast it was.
  const rates = ["finished", "stopped"].includes(status)
    ? `${number(time.mean_rate)} tokens/s over the whole run` : `${number(time.rate)} tokens/s in the last second, ${number(time.mean_rate)} over the run`;
  return `${all}${rates}; most time went into ${name} (${percent(ns / time.decode_ns)}).`;
}
