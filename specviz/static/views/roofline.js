// Which resource is the limit? What each draft length would bring, and where the run stands under its roofs.

import { button, el, legend, setText } from "../dom.js";
import { bytes, duration, number, percent } from "../format.js";
import { createPanel } from "../panel.js";
import { Plot, rings } from "../plots.js";
import { roundsOf } from "../selection.js";
import { colours } from "../theme.js";
import { createHierarchy } from "./hierarchy.js";

const HEIGHT = 270;
const TRAIL = 40;
const MB = 1e6;

export function createRoofline({ state, plotter, selection, wake }) {
  const panel = createPanel({
    id: "roofline",
    title: "Roofline",
    question: "Which resource is the limit?",
    table: () => hierarchy.shown() ? hierarchy.table() : ({
      head: ["round", "k", "tokens", "time", "waited-for bytes", "tokens/s", "compute roof"],
      rows: (state.figures?.roofline.points ?? []).map((p) =>
        [p.round, p.k, p.tokens, duration(p.seconds * 1e9), bytes(p.sync_bytes), number(p.rate), number(p.compute_roof)]),
      choose: ([round]) => selection.choose({ kind: "round", round }),
    }),
  });
  const held = () => (selection.current && roundsOf(selection.current, state.scene)) ?? new Set();
  const curve = new Plot({
    label: "Tokens a second, predicted for every draft length and measured", height: HEIGHT, plotter,
    figure: () => curveFigure(state.figures, colours(panel.root), held()),
    onClick: ({ data, customdata }) => data.name === "measured" && selection.choose({ kind: "round", round: customdata[0] }),
  });
  const roofs = new Plot({
    label: "Tokens a second against tokens per megabyte waited for, under the link and compute roofs", height: HEIGHT, plotter,
    figure: () => roofFigure(state.figures.roofline, colours(panel.root), held()),
    onClick: ({ data, customdata }) => data.name === "rounds" && selection.choose({ kind: "round", round: customdata }),
  });
  const words = el("p", { class: "sv-formula" });
  const hierarchy = createHierarchy({ state, plotter, wake, panel });
  const amortization = el("div", {}, el(
    "div", { class: "sv-pair" },
    el("div", {}, curve.node, legend([
      ["sv-mark-measured", "measured, older ones fade"], ["sv-mark-predicted", "predicted Θ(k)"], ["sv-mark-chosen", "chosen k"],
    ])),
    el("div", {}, roofs.node, legend([
      ["sv-mark-link", "link roof"], ["sv-mark-compute", "compute roof"], ["sv-mark-measured", "rounds"],
      ["sv-mark-window", "last 20 rounds"],
    ])),
  ), words);
  panel.body.append(amortization, hierarchy.root);
  hierarchy.root.hidden = true;
  const tabs = [["Amortization", amortization], ["Hierarchical", hierarchy.root]].map(([name, part]) =>
    button(name, `Show the ${name.toLowerCase()} roofline`, () => {
      for (const other of [amortization, hierarchy.root]) other.hidden = other !== part;
      for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.textContent === name));
      draw(state.figures);
      wake();
    }, part === amortization));
  panel.toggle.before(...tabs);

  selection.subscribe(() => {
    curve.invalidate(true);
    roofs.invalidate(true);
    wake();
  });

  function draw({ roofline, governor }) {
    if (hierarchy.shown()) return hierarchy.draw();
    panel.say(sentence(roofline.window));
    setText(words, formula(roofline, governor.latest));
    curve.invalidate();
    roofs.invalidate();
  }

  return { root: panel.root, draw, refreshTable: panel.refreshTable };
}

/** Older points fade. */
const fade = (points) => points.map((_, i) => 0.12 + 0.68 * ((i + 1) / points.length));

/** Dots of one k would hide each other: a small fixed shift by round keeps them apart. */
const shift = (round) => (((round * 7) % 11) - 5) * 0.028;

/** The latest points, and before them those that are chosen, however old. */
const shownPoints = (points, held) => points.filter((p, i) => i >= points.length - TRAIL || held.has(p.round));

function curveFigure({ governor, roofline }, looks, held) {
  const { latest } = governor;
  const points = shownPoints(roofline.points, held);
  const chosen = points.filter((p) => held.has(p.round));
  const data = [{
    name: "measured", type: "scatter", mode: "markers",
    x: points.map((p) => p.k + shift(p.round)), y: points.map((p) => p.rate),
    customdata: points.map((p) => [p.round, p.k]),
    marker: { color: looks.accepted, size: 8, opacity: fade(points) },
    hovertemplate: "round %{customdata[0]}, k = %{customdata[1]}: %{y:.1f} tokens/s<extra></extra>",
  }];
  if (latest) {
    const ks = latest.predicted_rate.map((_, k) => k);
    data.push({
      name: "predicted Θ(k)", type: "scatter", mode: "lines+markers", x: ks, y: latest.predicted_rate,
      line: { color: looks.muted, width: 2 }, marker: { size: 5 },
      hovertemplate: "k = %{x}: %{y:.1f} tokens/s predicted<extra></extra>",
    }, {
      name: "chosen k", type: "scatter", mode: "markers", x: [latest.k], y: [latest.predicted_rate[latest.k] ?? null],
      marker: { color: "rgba(0,0,0,0)", size: 17, line: { color: looks.rejected, width: 3 } },
      hovertemplate: "k = %{x} was chosen<extra></extra>",
    });
  }
  data.push(rings(looks, chosen.map((p) => p.k + shift(p.round)), chosen.map((p) => p.rate)));
  const most = Math.max(4, ...points.map((p) => p.k), (latest?.predicted_rate.length ?? 1) - 1);
  return {
    data,
    layout: {
      showlegend: false,
      xaxis: { title: { text: "draft length k (tokens)" }, dtick: most > 10 ? 2 : 1, range: [-0.5, most + 0.5] },
      yaxis: { title: { text: "tokens/s" }, rangemode: "tozero" },
    },
  };
}

function roofFigure({ points, window, link_bytes_per_s: link }, looks, held) {
  const waited = shownPoints(points, held).filter((p) => p.intensity !== null);
  const xs = waited.map((p) => p.intensity * MB);
  if (window.intensity !== null) xs.push(window.intensity * MB);
  const low = Math.min(...xs, 1) / 4;
  const high = Math.max(...xs, 1) * 4;
  const data = [];
  if (link) {
    data.push({
      name: "link roof", type: "scatter", mode: "lines", x: [low, high], y: [(low / MB) * link, (high / MB) * link],
      line: { color: looks.demand, width: 2 }, hovertemplate: "the link allows %{y:.1f} tokens/s<extra></extra>",
    });
  }
  if (window.compute_roof) {
    data.push({
      name: "compute roof", type: "scatter", mode: "lines", x: [low, high], y: [window.compute_roof, window.compute_roof],
      line: { color: looks.experts, width: 2 }, hovertemplate: "without waiting: %{y:.1f} tokens/s<extra></extra>",
    });
  }
  data.push({
    name: "rounds", type: "scatter", mode: "markers", x: waited.map((p) => p.intensity * MB), y: waited.map((p) => p.rate),
    customdata: waited.map((p) => p.round), marker: { color: looks.accepted, size: 7, opacity: fade(waited) },
    hovertemplate: "round %{customdata}: %{x:.2f} tokens/MB, %{y:.1f} tokens/s<extra></extra>",
  });
  if (window.intensity !== null) {
    data.push({
      name: "last 20 rounds", type: "scatter", mode: "markers", x: [window.intensity * MB], y: [window.rate],
      marker: { color: looks.rejected, size: 13, symbol: "diamond" },
      hovertemplate: "last 20 rounds: %{x:.2f} tokens/MB, %{y:.1f} tokens/s<extra></extra>",
    });
  }
  const chosen = waited.filter((p) => held.has(p.round));
  data.push(rings(looks, chosen.map((p) => p.intensity * MB), chosen.map((p) => p.rate)));
  return {
    data,
    layout: {
      showlegend: false,
      xaxis: { title: { text: "tokens per MB waited for" }, type: "log", range: [Math.log10(low), Math.log10(high)], dtick: 1 },
      yaxis: { title: { text: "tokens/s" }, type: "log", dtick: 1 },
    },
  };
}

function sentence({ bound, rate, io_roof: io, compute_roof: compute, rounds }) {
  if (!bound) return "The limit shows once a few rounds were measured.";
  if (bound === "link") {
    return `The link binds: at the bytes waited for it allows ${number(io)} tokens/s, compute alone would give ${number(compute)}; measured ${number(rate)}.`;
  }
  const why = io === null ? `nothing was waited for in the last ${rounds} rounds` : `the link would allow ${number(io)}`;
  return `Compute binds: without waiting it gives ${number(compute)} tokens/s, and ${why}; measured ${number(rate)}.`;
}

function formula({ window, link_bytes_per_s: link }, latest) {
  const parts = ["Θ(k) = expected tokens of a round / its predicted time"];
  if (link) parts.push(`link roof = tokens per byte waited for × ${bytes(link)}/s`);
  if (latest && window.rate) {
    const error = latest.predicted_rate[latest.k] / window.rate - 1;
    if (Number.isFinite(error)) parts.push(`prediction off by ${error > 0 ? "+" : "−"}${percent(Math.abs(error))} from the last 20 rounds`);
  }
  return parts.join(" · ");
}
