// Is the draft good here? By position, and how many tokens a round brings.

import { el, setText } from "../dom.js";
import { number, percent, plural } from "../format.js";
import { createPanel } from "../panel.js";
import { Plot } from "../plots.js";
import { colours } from "../theme.js";

const HEIGHT = 320;

export function createAcceptance({ state, plotter }) {
  const panel = createPanel({
    id: "acceptance",
    title: "Acceptance",
    question: "Is the draft good here?",
    table: () => ({
      head: ["position", "verified (n)", "accepted", "rate"],
      rows: (state.figures?.acceptance.by_position ?? []).map((row, i) => [i + 1, row.verified, row.accepted, percent(row.rate)]),
    }),
  });
  const positions = new Plot({
    label: "Acceptance by position in the draft", height: HEIGHT, plotter,
    figure: (width) => positionFigure(state.figures.acceptance, colours(panel.root), width),
  });
  const lengths = new Plot({
    label: "Histogram of tokens a round", height: HEIGHT, plotter,
    figure: () => lengthFigure(state.figures.acceptance, colours(panel.root)),
  });
  const words = el("p", { class: "sv-formula" });
  panel.body.append(el("div", { class: "sv-pair" }, positions.node, lengths.node), words);

  function draw({ acceptance }) {
    panel.say(sentence(acceptance));
    const { window } = acceptance;
    setText(words, `Last ${window.rounds} rounds: ${percent(window.rate)} accepted, ${number(window.mean_length)} tokens a round. Whole run: ${percent(acceptance.rate)}, ${number(acceptance.mean_length)}.`);
    positions.invalidate();
    lengths.invalidate();
  }

  return { root: panel.root, draw, refreshTable: panel.refreshTable };
}

function positionFigure({ by_position: rows }, looks, width) {
  // Narrow bars have no room for the letter.
  const label = (width - 70) / Math.max(4, rows.length) < 36 ? "" : "n ";
  return {
    data: [{
      type: "bar",
      x: rows.map((_, i) => i + 1),
      y: rows.map((row) => row.rate * 100),
      text: rows.map((row) => `${label}${row.verified}`),
      textposition: "outside",
      textfont: { size: 11 },
      textangle: 0,
      constraintext: "none",
      cliponaxis: false,
      marker: { color: looks.accepted },
      hovertemplate: "position %{x}: %{y:.1f} % of n %{customdata}<extra></extra>",
      customdata: rows.map((row) => row.verified),
    }],
    layout: {
      showlegend: false,
      xaxis: { title: { text: "position in the draft" }, dtick: 1, range: [0.4, Math.max(4, rows.length) + 0.6] },
      yaxis: { title: { text: label ? "accepted (%)" : "accepted (%), n above" }, range: [0, 112], tickvals: [0, 25, 50, 75, 100] },
    },
  };
}

function lengthFigure({ tokens_per_round: counts, mean_length: mean }, looks) {
  const shapes = mean === null ? [] : [{
    type: "line", x0: mean, x1: mean, yref: "paper", y0: 0, y1: 1, line: { color: looks.ink, width: 1.5, dash: "dot" },
  }];
  const annotations = mean === null ? [] : [{
    x: mean, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: `mean ${number(mean)}`, font: { color: looks.ink, size: 12 },
  }];
  return {
    data: [{
      type: "bar",
      x: counts.map((_, n) => n),
      y: counts,
      marker: { color: looks.bonus },
      hovertemplate: "%{x} tokens: %{y} rounds<extra></extra>",
    }],
    layout: {
      showlegend: false,
      shapes,
      annotations,
      xaxis: { title: { text: "tokens a round" }, dtick: 1, range: [0.4, Math.max(5, counts.length - 1) + 0.6] },
      yaxis: { title: { text: "rounds" }, rangemode: "tozero", ...(Math.max(0, ...counts) < 8 ? { dtick: 1 } : {}) },
    },
  };
}

function sentence({ verified, rate, mean_length: mean, speculative_rounds: drafting }) {
  if (!verified) return "Nothing was drafted yet.";
  return `${percent(rate)} of ${plural(verified, "verified draft token")} were accepted: ${number(mean)} tokens a round over ${plural(drafting, "round")} with a draft.`;
}
