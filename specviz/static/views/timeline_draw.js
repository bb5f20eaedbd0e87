// How the timeline is painted, and what lies under the pointer.

import { bytes, duration, instant, plural, value } from "../format.js";
import { moving } from "../overlap.js";
import { FONT } from "../plots.js";
import { holdsTransfer, roundsOf } from "../selection.js";

export const LANES = [
  { id: "draft", label: "draft", short: "draft" },
  { id: "attention", label: "verify: attention", short: "attention" },
  { id: "experts", label: "verify: experts", short: "experts" },
  { id: "demand", label: "link: demand", short: "demand" },
  { id: "prefetch", label: "link: prefetch", short: "prefetch" },
];
const TOP = 26;
const LANE = 42;
const BAR = 28;
const BOTTOM = 24;
export const HEIGHT = TOP + LANES.length * LANE + BOTTOM;
/** Arrows are drawn while they can be told apart. */
const MOST_ARROWS = 90;
const ROW = Object.fromEntries(LANES.map(({ id }, row) => [id, TOP + row * LANE + (LANE - BAR) / 2]));

/** Where slices go, beside the lane names. */
export function plotArea(width) {
  const left = width < 520 ? 62 : 116;
  return { left, width: Math.max(10, width - left - 8) };
}

/** A hatching in `colour` for the time in which the engine waits. */
export function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 12;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 2;
  pen.beginPath();
  for (const x of [-12, 0, 12]) {
    pen.moveTo(x, 12);
    pen.lineTo(x + 12, 0);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  // Drawn at twice its size, so that it stays sharp on dense screens.
  pattern.setTransform(new DOMMatrix().scale(0.5));
  return pattern;
}

export function drawTimeline({ context: pen, width, height }, view, scene, looks, pattern, selection) {
  const area = plotArea(width);
  const scale = area.width / (view.end - view.start);
  const x = (t) => area.left + (t - view.start) * scale;
  const seen = (item) => item.end >= view.start && item.start <= view.end;
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${FONT}`;
  pen.textBaseline = "middle";
  drawLanes(pen, width, area, looks);
  pen.save();
  pen.beginPath();
  pen.rect(area.left, 0, area.width, height);
  pen.clip();
  const { current: chosen } = selection;
  const numbers = chosen && roundsOf(chosen, scene);
  if (numbers) drawBands(pen, scene.rounds.filter((round) => seen(round) && numbers.has(round.round)), x, scale, height, looks);
  drawRounds(pen, scene.rounds.filter(seen), x, scale, height, looks);
  for (const slice of scene.slices) if (seen(slice)) drawSlice(pen, slice, x, scale, looks);
  const transfers = scene.transfers.filter(seen);
  for (const transfer of transfers) drawTransfer(pen, transfer, x, scale, looks);
  for (const stall of scene.stalls) if (seen(stall)) drawStall(pen, stall, x, scale, looks, pattern);
  if (chosen) drawFrames(pen, transfers.filter((transfer) => holdsTransfer(chosen, transfer, numbers)), x, scale, looks);
  drawArrows(pen, transfers, x, looks);
  drawKnobs(pen, scene.knobs.filter((knob) => knob.t >= view.start && knob.t <= view.end), x, height, looks);
  pen.restore();
  drawAxis(pen, view, area, x, height, looks);
}

function drawLanes(pen, width, area, looks) {
  LANES.forEach((lane, row) => {
    const y = TOP + row * LANE;
    pen.fillStyle = looks.faint;
    if (row % 2 === 0) pen.fillRect(area.left, y, area.width, LANE);
    pen.fillStyle = looks.muted;
    pen.textAlign = "left";
    pen.fillText(width < 520 ? lane.short : lane.label, 0, y + LANE / 2);
  });
}

/** The chosen rounds, from top to bottom. */
function drawBands(pen, rounds, x, scale, height, looks) {
  pen.fillStyle = looks.focus;
  pen.globalAlpha = 0.16;
  for (const round of rounds) pen.fillRect(x(round.start), 0, Math.max(2, (round.end - round.start) * scale), height - BOTTOM);
  pen.globalAlpha = 1;
}

/** Frames around the transfers that belong to what is chosen. */
function drawFrames(pen, transfers, x, scale, looks) {
  pen.strokeStyle = looks.focus;
  pen.lineWidth = 2;
  for (const transfer of transfers) {
    pen.strokeRect(x(transfer.start) - 1.5, ROW[transfer.lane] - 2.5, Math.max(1, (transfer.end - transfer.start) * scale) + 3, BAR + 5);
  }
}

/** How many tokens a round brought of those that it could bring. */
function brought({ tokens, k }, wordy) {
  if (!k) return plural(tokens, "token");
  return `${tokens} of ${k + 1}${wordy ? " tokens" : ""}`;
}

function drawRounds(pen, rounds, x, scale, height, looks) {
  pen.textAlign = "left";
  let free = -Infinity;
  for (const round of rounds) {
    const left = x(round.start);
    pen.strokeStyle = looks.line;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(left) + 0.5, 4);
    pen.lineTo(Math.round(left) + 0.5, height - BOTTOM);
    pen.stroke();
    const room = (round.end - round.start) * scale;
    const text = room > 120 ? `round ${round.round}: ${brought(round, room > 165)}` : room > 34 ? `${round.round}` : "";
    if (!text || left < free) continue;
    pen.fillStyle = looks.muted;
    pen.fillText(text, left + 5, 13);
    free = left + pen.measureText(text).width + 8;
  }
}

function drawSlice(pen, slice, x, scale, looks) {
  const left = x(slice.start);
  const wide = Math.max(1, (slice.end - slice.start) * scale - (scale * (slice.end - slice.start) > 3 ? 0.75 : 0));
  pen.globalAlpha = slice.pass === "prefill" ? 0.45 : 1;
  pen.fillStyle = looks[slice.lane];
  pen.fillRect(left, ROW[slice.lane], wide, BAR);
  pen.globalAlpha = 1;
}

/** Solid: it served. Outlined: wasted, cancelled, or its fate is not known yet. Faint: it was overtaken. */
function drawTransfer(pen, transfer, x, scale, looks) {
  const { pauses } = transfer;
  if (pauses.length) {
    pen.globalAlpha = 0.25;
    pen.fillStyle = looks[transfer.lane];
    pen.fillRect(x(transfer.start), ROW[transfer.lane] + BAR / 2 - 1, (transfer.end - transfer.start) * scale, 2);
    pen.globalAlpha = 1;
  }
  for (const [start, end] of moving(transfer.start, transfer.end, pauses)) {
    drawStretch(pen, transfer, x(start), Math.max(1.5, (end - start) * scale - 0.75), looks);
  }
}

function drawStretch(pen, transfer, left, wide, looks) {
  const y = ROW[transfer.lane];
  const served = transfer.outcome === "used" || transfer.outcome === "late" || transfer.outcome === "demand";
  pen.fillStyle = pen.strokeStyle = looks[transfer.lane];
  if (served) return pen.fillRect(left, y, wide, BAR);
  pen.globalAlpha = 0.18;
  pen.fillRect(left, y, wide, BAR);
  pen.globalAlpha = transfer.outcome ? 0.9 : 0.5;
  pen.lineWidth = 1.25;
  pen.strokeRect(left + 0.75, y + 0.75, Math.max(0.5, wide - 1.5), BAR - 1.5);
  pen.globalAlpha = 1;
}

/** A stall crosses the lanes from the waiting experts to the link that they wait for. */
function drawStall(pen, stall, x, scale, looks, pattern) {
  const left = x(stall.start);
  const wide = Math.max(1, (stall.end - stall.start) * scale);
  pen.fillStyle = looks.panel;
  pen.fillRect(left, ROW.experts, wide, BAR);
  // Hatched however narrow: the pattern belongs to the canvas, so that many thin stalls make one hatching.
  pen.fillStyle = pattern;
  pen.fillRect(left, ROW.experts, wide, BAR);
  pen.fillStyle = looks.stall;
  pen.globalAlpha = 0.13;
  pen.fillRect(left, ROW.experts + BAR, wide, ROW.prefetch - ROW.experts);
  pen.globalAlpha = 1;
}

/** From the end of a prefetch to the layer that used it. */
function drawArrows(pen, transfers, x, looks) {
  const used = transfers.filter((transfer) => transfer.cause === "prefetch" && transfer.outcome === "used");
  if (used.length > MOST_ARROWS) return;
  const from = ROW.prefetch;
  const to = ROW.experts + BAR;
  pen.strokeStyle = pen.fillStyle = looks.muted;
  pen.lineWidth = 1;
  pen.globalAlpha = 0.45;
  for (const transfer of used) {
    const left = x(transfer.end);
    const right = x(transfer.fated);
    pen.beginPath();
    pen.moveTo(left, from);
    pen.bezierCurveTo(left + (right - left) * 0.15, (from + to) / 2, right, (from + to) / 2, right, to + 4);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(right, to);
    pen.lineTo(right - 3, to + 5);
    pen.lineTo(right + 3, to + 5);
    pen.fill();
  }
  pen.globalAlpha = 1;
}

function drawKnobs(pen, knobs, x, height, looks) {
  pen.textAlign = "left";
  for (const knob of knobs) {
    const at = Math.round(x(knob.t)) + 0.5;
    pen.strokeStyle = looks.knob;
    pen.lineWidth = 1.5;
    pen.setLineDash([4, 3]);
    pen.beginPath();
    pen.moveTo(at, 0);
    pen.lineTo(at, height - BOTTOM);
    pen.stroke();
    pen.setLineDash([]);
    const text = `${knob.name} ${value(knob.old)} → ${value(knob.new)}`;
    pen.fillStyle = looks.panel;
    pen.fillRect(at + 2, TOP + 1, pen.measureText(text).width + 8, 16);
    pen.fillStyle = looks.knob;
    pen.fillText(text, at + 6, TOP + 9);
  }
}

function drawAxis(pen, view, area, x, height, looks) {
  const span = view.end - view.start;
  const wanted = Math.max(2, Math.floor(area.width / 90));
  const magnitude = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 5, 10].map((n) => n * magnitude).find((size) => span / size <= wanted) ?? magnitude * 10;
  pen.fillStyle = looks.muted;
  pen.strokeStyle = looks.line;
  pen.lineWidth = 1;
  pen.textAlign = "center";
  const y = height - BOTTOM;
  pen.beginPath();
  pen.moveTo(area.left, y + 0.5);
  pen.lineTo(area.left + area.width, y + 0.5);
  for (let t = Math.ceil(view.start / step) * step; t <= view.end; t += step) {
    const at = Math.round(x(t)) + 0.5;
    if (t < 0 || at < area.left + 14 || at > area.left + area.width - 16) continue;
    pen.moveTo(at, y);
    pen.lineTo(at, y + 4);
    pen.fillText(instant(t, step, view.end), at, y + 14);
  }
  pen.stroke();
}

/** What is drawn at a point: {kind: stall | transfer | slice, item}, or null. */
function itemAt({ width }, view, scene, px, py) {
  const area = plotArea(width);
  const row = Math.floor((py - TOP) / LANE);
  const lane = LANES[row]?.id;
  if (!lane || px < area.left) return null;
  const per = (view.end - view.start) / area.width;
  const t = view.start + (px - area.left) * per;
  // Two pixels of grace, so that thin slices can be hit.
  const hit = (item) => item.start - 2 * per <= t && t <= item.end + 2 * per;
  const stall = lane === "experts" && scene.stalls.findLast(hit);
  if (stall) return { kind: "stall", item: stall };
  const transfer = scene.transfers.findLast((item) => item.lane === lane && hit(item));
  if (transfer) return { kind: "transfer", item: transfer };
  const slice = scene.slices.findLast((item) => item.lane === lane && hit(item));
  return slice ? { kind: "slice", item: slice } : null;
}

/** What a click at a point chooses: a transfer's expert in its round, any other slice's round. Null for none. */
export function choiceAt(picture, view, scene, px, py) {
  const found = itemAt(picture, view, scene, px, py);
  if (!found || found.item.round < 0) return null;
  const { round, layer, expert } = found.item;
  return found.kind === "transfer" ? { kind: "expert", layer, expert, round } : { kind: "round", round };
}

/** The words for what is drawn at a point, or null. */
export function sliceAt(picture, view, scene, px, py) {
  const found = itemAt(picture, view, scene, px, py);
  if (!found) return null;
  const { kind, item } = found;
  if (kind === "transfer") return describeTransfer(item);
  const time = duration(item.end - item.start);
  if (kind === "stall") return [`Stall of ${time}`, `layer ${item.layer} waited for an expert`, `round ${item.round}`];
  const where = item.layer < 0 ? "the whole pass" : `layer ${item.layer}`;
  return [`${item.pass}: ${item.op}, ${time}`, `${where}, ${item.rows} rows`, `round ${item.round}`];
}

function describeTransfer(transfer) {
  const fate = { used: "was there in time", late: "came late", demand: "nobody foresaw it", wasted: "was never used", cancelled: "was cancelled" };
  const pauses = transfer.pauses.reduce((sum, [start, end]) => sum + end - start, 0);
  const overtaken = pauses ? `, overtaken for ${duration(pauses)}` : "";
  return [
    `Expert ${transfer.expert} of layer ${transfer.layer}: ${fate[transfer.outcome] ?? "not used yet"}`,
    `${transfer.cause}, ${bytes(transfer.bytes)} in ${duration(transfer.end - transfer.start - pauses)}${overtaken}`,
    `waited ${duration(transfer.start - transfer.queued)} in the queue, round ${transfer.round}`,
  ];
}
