// Plotly, tamed: one newPlot for the page's life, then react; at most one plot a frame and two redraws a
// second each; only while it can be seen.

import { el } from "./dom.js";
import { colours } from "./theme.js";

const REDRAW_EVERY = 500;
/** Plots narrower than this (px) get a lower height. */
const NARROW = 340;
const NARROW_HEIGHT = 250;
const UNSEEN_WIDTH = 560;
const WAIT_FOR_PLOTLY = 20_000;
export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';

let loading = null;

/** Resolves with window.Plotly; rejects with a sentence for people. */
export function plotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  loading ??= new Promise((resolve, reject) => {
    const fail = () => reject(new Error("The plots could not be loaded: plotly.min.js did not arrive. Reload the page."));
    let script = document.querySelector('script[src*="plotly.min.js"]');
    if (!script) {
      script = el("script", { src: new URL("../plotly.min.js", import.meta.url).href });
      document.head.append(script);
    }
    const ready = () => window.Plotly && (clearTimeout(limit), resolve(window.Plotly));
    script.addEventListener("load", ready);
    script.addEventListener("error", fail);
    // The script may have run between the first look and the listener.
    const limit = setTimeout(() => ready() || fail(), WAIT_FOR_PLOTLY);
    queueMicrotask(ready);
  });
  return loading;
}

/** A plot's place on the page. `figure()` gives {data, layout} whenever it is to be drawn. */
export class Plot {
  #drawn = -Infinity;
  #dirty = true;
  #visible = false;
  #made = false;
  #width = 0;

  constructor({ label, height, figure, plotter, onClick }) {
    this.node = el("div", { class: "sv-plot", role: "img", "aria-label": label });
    this.node.style.height = `${height}px`;
    this.figure = figure;
    this.onClick = onClick;
    this.fullHeight = height;
    new IntersectionObserver((entries) => {
      this.#visible = entries[entries.length - 1].isIntersecting;
      if (this.#visible) plotter.wake();
    }).observe(this.node);
    new ResizeObserver(() => {
      const width = this.node.clientWidth;
      if (width > 0 && width !== this.#width) {
        this.#width = width;
        this.height = width < NARROW ? Math.min(this.fullHeight, NARROW_HEIGHT) : this.fullHeight;
        this.node.style.height = `${this.height}px`;
        this.invalidate(true);
        plotter.wake();
      }
    }).observe(this.node);
    plotter.add(this);
  }

  invalidate(now = false) {
    this.#dirty = true;
    if (now) this.#drawn = -Infinity;
  }

  /** Draw if there is a reason to. Returns whether it did. */
  draw(now, uirevision) {
    if (!this.#dirty || !this.#visible || !this.#width || now - this.#drawn < REDRAW_EVERY) return false;
    this.#dirty = false;
    this.#drawn = now;
    const { data, layout } = this.spec();
    const full = { ...layout, uirevision };
    const config = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: "reset" };
    if (this.#made) window.Plotly.react(this.node, data, full, config);
    else this.#make(data, full, config);
    return true;
  }

  #make(data, layout, config) {
    this.#made = true;
    window.Plotly.newPlot(this.node, data, layout, config);
    if (this.onClick) this.node.on("plotly_click", ({ points }) => this.onClick(points[0]));
  }

  /** {data, layout} as it would be drawn now, for a picture even of a plot that nobody has scrolled to. */
  spec() {
    const width = this.#width || UNSEEN_WIDTH;
    const { data, layout } = this.figure(width);
    const full = { ...baseLayout(this.node, this.height ?? this.fullHeight, width), ...layout };
    for (const axis of Object.keys(full).filter((key) => /^[xy]axis/.test(key))) {
      full[axis] = { ...baseAxis(this.node), ...full[axis] };
    }
    return { data, layout: full };
  }

  /** Say why there is no plot. */
  fail(message) {
    this.node.replaceChildren(el("p", { class: "sv-failure", text: message }));
  }

  get waiting() {
    return this.#dirty && this.#visible;
  }
}

/** All plots of the page. */
export class Plotter {
  plots = [];
  #ready = false;
  #turn = 0;

  constructor(wake) {
    this.wake = wake;
    plotly().then(
      () => {
        this.#ready = true;
        wake();
      },
      (error) => this.plots.forEach((plot) => plot.fail(error.message)),
    );
  }

  add(plot) {
    this.plots.push(plot);
  }

  invalidate(now = false) {
    for (const plot of this.plots) plot.invalidate(now);
  }

  /** Draw at most one plot; true while some still wait for their turn. */
  frame(now, uirevision) {
    if (!this.#ready) return false;
    for (let i = 0; i < this.plots.length; i++) {
      const plot = this.plots[(this.#turn + i) % this.plots.length];
      if (plot.draw(now, uirevision)) {
        this.#turn = (this.#turn + i + 1) % this.plots.length;
        break;
      }
    }
    return this.plots.some((plot) => plot.waiting);
  }
}

function baseLayout(node, height, width) {
  const { ink, muted } = colours(node);
  return {
    width,
    height,
    margin: { l: 52, r: 14, t: 26, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: FONT, size: 12, color: muted },
    hoverlabel: { font: { family: FONT, size: 12 } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: ink } },
    dragmode: "zoom",
    bargap: 0.28,
  };
}

function baseAxis(node) {
  const { line, faint } = colours(node);
  return { gridcolor: faint, linecolor: line, zerolinecolor: line, automargin: true, ticks: "", fixedrange: false };
}

/** Vertical marks where a person's knob took effect: shapes and annotations over an x axis. */
export function knobMarks(node, knobs, x) {
  const { knob, muted } = colours(node);
  const recent = knobs.slice(-12);
  return {
    shapes: recent.map((change) => ({
      type: "line", x0: x(change), x1: x(change), yref: "paper", y0: 0, y1: 1,
      line: { color: knob, width: 1, dash: "dot" },
    })),
    annotations: recent.map((change, i) => ({
      x: x(change), yref: "paper", y: 1 - (i % 3) * 0.11, yanchor: "top", xanchor: "left", showarrow: false,
      text: escapeMarkup(`${change.name} ${change.old}→${change.new}`), font: { size: 11, color: muted },
    })),
  };
}

/** A ring around points, for those that are chosen. */
export const rings = (looks, x, y, size = 16) => ({
  name: "chosen", type: "scatter", mode: "markers", x, y, hoverinfo: "skip",
  marker: { color: "rgba(0,0,0,0)", size, line: { color: looks.focus, width: 2.5 } },
});

/** Plotly reads a few tags in its texts; what comes from a run must not be one. */
export const escapeMarkup = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
