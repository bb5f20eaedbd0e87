// Is the draft good here? By position, and how many tokens a round brings.

import { el, setText } from "../dom.js";
import { number, percent, plural } from "../format.js";
import { createPanel } from "../panel.js";
import { Plot } from "../plots.js";
import { roundsOf } from "../selection.js";
import { colours } from "../theme.js";

const HEIGHT = 320;

export function createAcceptance({ state, plotter, selection, wake }) {
  const panel = createPanel({
    id: "acceptance",
    title: "Acceptance",
    question: "Is the draft good here?",
    table: () => ({
      head: ["position", "verified (n)", "accepted", "rate"],
      rows: (state.figures?.acceptance.by_position ?? []).map((row, i) => [i + 1, row.verified, row.accepted, percent(row.rate)]),
      choose: ([position]) => selection.choose({ kind: "position", position: position - 1 }),
    }),
  });
  const positions = new Plot({
    label: "Acceptance by position in the draft", height: HEIGHT, plotter,
    figure: (width) => positionFigure(state.figures.acceptance, colours(panel.root), width, chosenPosition(selection.current)),
    onClick: ({ x }) => selection.choose({ kind: "position", position: x - 1 }),
  });
  const lengths = new Plot({
    label: "Histogram of tokens a round", height: HEIGHT, plotter,
    figure: () => lengthFigure(state.figures.acceptance, colours(panel.root), chosenLengths(selection.current, state.scene)),
    onClick: ({ x }) => selection.choose({ kind: "length", tokens: x }),
  });
  const words = el("p", { class: "sv-formula" });
  panel.body.append(el("div", { class: "sv-pair" }, positions.node, lengths.node), words);

  selection.subscribe(() => {
    positions.invalidate(true);
    lengths.invalidate(true);
    wake();
  });

  function draw({ acceptance }) {
    panel.say(sentence(acceptance));
    const { window } = acceptance;
    setText(words, `Last ${window.rounds === 1 ? "round" : `${window.rounds} rounds`}: ${percent(window.rate)} accepted, ${number(window.mean_length)} tokens a round. Whole run: ${percent(acceptance.rate)}, ${number(acceptance.mean_length)}.`);
    positions.invalidate();
    lengths.invalidate();
  }

  return { root: panel.root, draw, refreshTable: panel.refreshTable };
}

/** The position in the draft of what is chosen, from 0. */
const chosenPosition = (what) =>
  what?.kind === "position" ? what.position : what?.kind === "token" && what.token.round !== null ? what.token.position : null;

/** How many tokens the chosen rounds brought. */
function chosenLengths(what, scene) {
  const rounds = what && roundsOf(what, scene);
  return new Set(rounds ? scene.rounds.filter(({ round }) => rounds.has(round)).map(({ tokens }) => tokens) : []);
}

/** Bars of one colour, those that are chosen with a frame. */
const framed = (colour, held, looks) => ({ color: colour, line: { color: looks.focus, width: held.map((yes) => (yes ? 3 : 0)) } });

/** Width of a digit on a bar, in pixels. */
const DIGIT = 6.5;

function positionFigure({ by_position: rows }, looks, width, chosen) {
  // Narrow bars have no room for the letter, and still narrower ones only for every second or third number.
  const room = (width - 70) / Math.max(4, rows.length);
  const label = room < 36 ? "" : "n ";
  const every = label ? 1 : Math.ceil((DIGIT * String(rows[0]?.verified ?? 0).length + DIGIT) / room);
  return {
    data: [{
      type: "bar",
      x: rows.map((_, i) => i + 1),
      y: rows.map((row) => row.rate * 100),
      text: rows.map((row, i) => (i % every ? "" : `${label}${row.verified}`)),
      textposition: "outside",
      textfont: { size: 11 },
      textangle: 0,
      constraintext: "none",
      cliponaxis: false,
      marker: framed(looks.accepted, rows.map((_, i) => i === chosen), looks),
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

function lengthFigure({ tokens_per_round: counts, mean_length: mean }, looks, chosen) {
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
      marker: framed(looks.muted, counts.map((_, n) => chosen.has(n)), looks),
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
