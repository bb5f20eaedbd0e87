// The hierarchical roofline of the run itself, log–log: roofs as measured, and one dot a phase.

import { el, legend } from "../dom.js";
import { number, percent } from "../format.js";
import { Plot } from "../plots.js";
import { colours } from "../theme.js";
import { roofsFigure, roofsLegend } from "./roofs.js";

export function createHierarchy({ state, plotter, wake, panel }) {
  let report = null;
  let known = "";
  const plot = new Plot({
    label: "TFLOP/s of each phase against FLOP a byte, under the roofs of arithmetic, memory and link", height: 320, plotter,
    figure: () => roofsFigure(report, colours(panel.root)),
  });
  const key = el("div", {});
  const root = el("div", {}, plot.node, key, el("p", { class: "sv-formula", text: "The last 20 rounds. FLOP = 2 × rows × weights; bytes = weights read from memory, or, for the whole round, experts moved over the link. Roofs of arithmetic and memory were measured as the engine started." }));

  function draw() {
    report = state.phases.report();
    panel.say(sentence(report));
    plot.invalidate();
    const items = report ? roofsLegend(report) : [];
    if (JSON.stringify(items) === known) return;
    known = JSON.stringify(items);
    key.replaceChildren(legend(items));
    wake();
  }

  const table = () => ({
    head: ["phase", "on", "FLOP/byte", "GFLOP/s", "the roof there", "of the roof", "what limits"],
    rows: (report?.roofline ?? []).map((p) => [
      p.phase, p.where, number(p.intensity), number(p.measured * 1e3), Number.isFinite(p.tflops) ? number(p.tflops * 1e3) : null,
      Number.isFinite(p.tflops) ? percent(p.measured / p.tflops) : null, p.binds,
    ]),
  });
  return { root, draw, table, shown: () => !root.hidden };
}

export function sentence(report) {
  if (!report?.roofline.length) return "Phases show once a few rounds were measured (and the run tells its model's sizes).";
  const far = report.roofline.filter((point) => Number.isFinite(point.tflops));
  const parts = (far.length ? far : report.roofline).map((point) => far.length
    ? `${point.phase} at ${percent(point.measured / point.tflops)} of its roof (${point.binds})`
    : `${point.phase} at ${number(point.measured * 1e3)} GFLOP/s`);
  const text = parts.join(", ");
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}
