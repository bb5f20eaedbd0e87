// Where experts are and what is hot: a grid of layers and experts, and hits, late ones and misses by round.

import { canvas, el, legend, setText, tooltip } from "../dom.js";
import { integer, percent } from "../format.js";
import { createPanel } from "../panel.js";
import { FONT } from "../plots.js";
import { expertsOf } from "../selection.js";
import { colours, onThemeChange, reducedMotion } from "../theme.js";

const AXIS = { left: 30, top: 20 };
const FLASH = 700;
const BARS = 60;
const BAR_HEIGHT = 74;

export function createExperts({ state, selection, wake }) {
  const panel = createPanel({
    id: "experts",
    title: "Expert cache",
    question: "Where are the experts, and what is hot?",
    table: () => expertTable(state.figures),
  });
  let looks = colours(panel.root);
  let stale = true;
  let cursor = null;
  let flashes = { list: null, at: -Infinity };
  const redraw = () => {
    stale = true;
    wake();
  };
  const grid = canvas({ tabindex: "0", role: "img", "aria-describedby": "sv-experts-sentence" }, 180, redraw);
  grid.node.setAttribute("aria-label", "Grid of layers (rows) and experts (columns). Arrow keys read one cell after the other, Enter chooses it.");
  const bars = canvas({ role: "img", "aria-label": "Hits, late and missed experts by round" }, BAR_HEIGHT, redraw);
  const tip = tooltip(grid.box);
  const words = el("p", { class: "sv-formula" });
  const reading = el("p", { class: "sv-hint", "aria-live": "off" });
  panel.body.append(grid.box, legend([
    ["sv-cell-resident", "resident"], ["sv-cell-used", "used in this round"], ["sv-cell-heat", "used often (fades)"],
    ["sv-cell-evicted", "evicted"], ["sv-cell-selected", "of what is chosen"],
  ]), reading, bars.box, legend([["sv-fill-hit", "hit"], ["sv-fill-late", "late"], ["sv-fill-miss", "miss"]]), words);
  onThemeChange(() => {
    looks = colours(panel.root);
    redraw();
  });

  selection.subscribe(redraw);

  const geometry = () => {
    const heat = state.figures?.experts.heat ?? [];
    const columns = heat[0]?.length ?? 0;
    const size = columns ? Math.max(4, Math.min(30, (grid.width - AXIS.left - 2) / columns)) : 0;
    const high = Math.max(5, Math.min(size, 26));
    return { rows: heat.length, columns, size, high };
  };

  function frame(now) {
    const flashing = now - flashes.at < FLASH && !reducedMotion();
    if ((!stale && !flashing) || !grid.width || !state.figures) return flashing;
    stale = false;
    const shape = geometry();
    grid.setHeight(Math.max(60, AXIS.top + shape.rows * shape.high + 4));
    const chosen = selection.current ? expertsOf(selection.current, state.scene) : [];
    drawGrid(grid, shape, { ...state.figures.experts, chosen }, looks, flashing ? { list: flashes.list, strength: 1 - (now - flashes.at) / FLASH } : null, cursor);
    drawBars(bars, state.figures.experts.series, looks);
    return flashing;
  }

  function draw(figures, _state, now) {
    const { experts } = figures;
    if (experts.evicted !== flashes.list && experts.evicted.length) flashes = { list: experts.evicted, at: now };
    const { window } = experts;
    panel.say(sentence(experts));
    setText(words, window.requests
      ? `Last 20 rounds: ${integer(window.hits)} hits, ${integer(window.late)} late, ${integer(window.misses)} misses of ${integer(window.requests)} requests`
      : "hits + late + misses = requests");
    stale = true;
  }

  const read = (cell) => {
    cursor = cell;
    const lines = cell && cellWords(state.figures.experts, cell);
    setText(reading, lines ? lines.join(", ") : "");
    redraw();
    return lines;
  };
  const cellAt = (event) => {
    const { rows, columns, size, high } = geometry();
    const layer = Math.floor((event.offsetY - AXIS.top) / high);
    const expert = Math.floor((event.offsetX - AXIS.left) / size);
    return layer >= 0 && layer < rows && expert >= 0 && expert < columns ? [layer, expert] : null;
  };
  const choose = (cell) => cell && selection.choose({ kind: "expert", layer: cell[0], expert: cell[1] }, "experts");
  grid.node.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (cell) tip.show(event.offsetX, event.offsetY, cellWords(state.figures.experts, cell));
    else tip.hide();
  });
  grid.node.addEventListener("click", (event) => choose(cellAt(event)));
  grid.node.addEventListener("pointerleave", () => tip.hide());
  grid.node.addEventListener("blur", () => read(null));
  grid.node.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const { rows, columns } = geometry();
    if (event.key === "Enter") choose(cursor);
    if (!step || !rows) return;
    event.preventDefault();
    const [layer, expert] = cursor ?? [0, 0];
    const clamp = (at, size) => Math.max(0, Math.min(at, size - 1));
    read([clamp(layer + step[0], rows), clamp(expert + step[1], columns)]);
  });
  const reset = () => {
    cursor = null;
    flashes = { list: null, at: -Infinity };
    stale = true;
  };
  return { root: panel.root, draw, frame, reset, refreshTable: panel.refreshTable };
}

function drawGrid({ context: pen, width, height }, { rows, columns, size, high }, experts, looks, flash, cursor) {
  const { heat, resident, used, chosen } = experts;
  pen.clearRect(0, 0, width, height);
  if (!columns) return;
  const x = (expert) => AXIS.left + expert * size;
  const y = (layer) => AXIS.top + layer * high;
  const gap = size > 9 ? 1.5 : 0.5;
  // Heat is the share of recent rounds that used the expert; its square root shows the rare ones too.
  for (let layer = 0; layer < rows; layer++) {
    for (let expert = 0; expert < columns; expert++) {
      pen.globalAlpha = 0.06 + 0.94 * Math.sqrt(Math.min(1, heat[layer][expert]));
      pen.fillStyle = looks.heat;
      pen.fillRect(x(expert) + gap, y(layer) + gap, size - 2 * gap, high - 2 * gap);
    }
  }
  pen.globalAlpha = 1;
  const frame = (layer, expert, colour, line, inset) => {
    pen.strokeStyle = colour;
    pen.lineWidth = line;
    pen.strokeRect(x(expert) + inset, y(layer) + inset, size - 2 * inset, high - 2 * inset);
  };
  const each = (lists, action) => lists.forEach((list, layer) => list.forEach((expert) => action(layer, expert)));
  each(resident, (layer, expert) => frame(layer, expert, looks.ink, size > 9 ? 1.5 : 1, gap + 0.25));
  each(used, (layer, expert) => {
    const radius = Math.max(1.2, Math.min(size, high) * 0.16);
    pen.beginPath();
    pen.arc(x(expert) + size / 2, y(layer) + high / 2, radius + 1.2, 0, 7);
    pen.fillStyle = looks.panel;
    pen.fill();
    pen.beginPath();
    pen.arc(x(expert) + size / 2, y(layer) + high / 2, radius, 0, 7);
    pen.fillStyle = looks.bonus;
    pen.fill();
  });
  if (flash) {
    pen.globalAlpha = flash.strength;
    for (const [layer, expert] of flash.list) frame(layer, expert, looks.rejected, 3, gap + 1);
    pen.globalAlpha = 1;
  }
  each(chosen, (layer, expert) => frame(layer, expert, looks.prefetch, 2.5, 0.75));
  if (cursor) frame(cursor[0], cursor[1], looks.knob, 2.5, 0);
  pen.font = `11px ${FONT}`;
  pen.fillStyle = looks.muted;
  pen.textBaseline = "middle";
  const every = Math.ceil(22 / size);
  pen.textAlign = "center";
  for (let expert = 0; expert < columns; expert += every) pen.fillText(String(expert), x(expert) + size / 2, 10);
  pen.textAlign = "right";
  for (let layer = 0; layer < rows; layer += Math.ceil(13 / high)) pen.fillText(`L${layer}`, AXIS.left - 6, y(layer) + high / 2);
}

function drawBars({ context: pen, width, height }, series, looks) {
  pen.clearRect(0, 0, width, height);
  const shown = series.slice(-BARS);
  if (!shown.length) return;
  const most = Math.max(...shown.map((round) => round.hits + round.late + round.misses), 1);
  const step = (width - AXIS.left) / BARS;
  const base = height - 16;
  shown.forEach((round, i) => {
    let bottom = base;
    for (const [count, name] of [[round.hits, "hit"], [round.late, "late"], [round.misses, "miss"]]) {
      const tall = (count / most) * (base - 8);
      pen.fillStyle = looks[name];
      pen.fillRect(AXIS.left + i * step, bottom - tall, Math.max(1, step - 1), tall);
      bottom -= tall;
    }
  });
  pen.font = `11px ${FONT}`;
  pen.fillStyle = looks.muted;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.fillText(String(most), AXIS.left - 6, 9);
  pen.fillText("0", AXIS.left - 6, base - 3);
  pen.textAlign = "left";
  pen.fillText(`requests, rounds ${shown[0].round} to ${shown[shown.length - 1].round}`, AXIS.left, height - 6);
}

function cellWords({ resident, used, heat }, [layer, expert]) {
  return [
    `Layer ${layer}, expert ${expert}`,
    resident[layer]?.includes(expert) ? "resident" : "not resident",
    used[layer]?.includes(expert) ? "used in the last round" : "not used in the last round",
    `heat ${percent(heat[layer]?.[expert])} of recent rounds`,
  ];
}

function sentence({ requests, hit_rate: rate, ready_rate: ready, slots_per_layer: slots, heat, evictions }) {
  const room = heat.length ? `${slots} of ${heat[0].length} experts of each layer fit in fast memory.` : "";
  if (!requests) return `${room} Nothing was requested yet.`.trim();
  return `${room} ${percent(rate)} of requests found their expert there or on its way (${percent(ready)} at once); ${integer(evictions)} evictions.`;
}

function expertTable(figures) {
  const { resident = [], used = [], heat = [] } = figures?.experts ?? {};
  const rows = heat.map((row, layer) => {
    const hottest = row.map((share, expert) => [share, expert]).sort((a, b) => b[0] - a[0]).slice(0, 4);
    return [layer, resident[layer]?.join(" "), used[layer]?.join(" "), hottest.map(([share, expert]) => `${expert} (${percent(share)})`).join(", ")];
  });
  return { head: ["layer", "resident", "used in the last round", "hottest"], rows };
}
