// The hero: what the engine computed while experts crossed the link, and where it had to wait.

import { button, canvas, el, legend, setText, tooltip } from "../dom.js";
import { duration, integer, percent, value } from "../format.js";
import { createPanel } from "../panel.js";
import { roundsOf } from "../selection.js";
import { colours, onThemeChange, reducedMotion } from "../theme.js";
import { HEIGHT, LANES, choiceAt, drawTimeline, hatch, plotArea, sliceAt } from "./timeline_draw.js";

/** Pixels that a round gets while the picture follows the run. */
const ROUND_WIDTH = 230;
const SHORTEST = 2e4;
/** A pointer that moved less (px) has clicked, not dragged. */
const CLICK = 4;
const KEYS = { w: "in", s: "out", a: "left", d: "right", "+": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right" };

export function createTimeline({ state, selection, wake }) {
  const panel = createPanel({
    id: "timeline",
    title: "Overlap timeline",
    question: "What is hidden, and what stalls?",
    table: () => ({
      ...timelineTable(state.scene),
      choose: (row) => row[6] >= 0 && selection.choose({ kind: "round", round: row[6] }, "timeline"),
    }),
  });
  const picture = canvas({ tabindex: "0", role: "img", "aria-describedby": "sv-timeline-sentence" }, HEIGHT, () => changed());
  picture.node.setAttribute("aria-label", "Timeline of computation and transfers. W and S zoom, A and D move, F fits, Space freezes, N and B choose the next round and the one before.");
  const tip = tooltip(picture.box);
  const formula = el("p", { class: "sv-formula" });
  const view = { start: 0, end: 1e8, follow: true };
  let looks = colours(panel.root);
  let pattern = null;
  let stale = true;

  const follow = button("Follow", "Keep the latest rounds in view (Space)", () => setFollow(!view.follow), true);
  panel.toggle.before(
    follow,
    button("Fit", "Show the whole run (F)", fit),
    button("+", "Zoom in (W)", () => zoom(0.6)),
    button("−", "Zoom out (S)", () => zoom(1 / 0.6)),
  );
  panel.body.append(picture.box, createKey(), formula, el("p", {
    class: "sv-hint",
    text: "Drag to move. Click the picture, then use the wheel or W A S D to zoom and move, F to fit, Space to freeze. Click a slice to choose its round (B and N: the one before, the next), a transfer to choose its expert.",
  }));
  onThemeChange(() => {
    looks = colours(panel.root);
    pattern = null;
    changed();
  });

  function changed() {
    stale = true;
    wake();
  }

  function setFollow(on) {
    view.follow = on;
    follow.setAttribute("aria-pressed", String(on));
    setText(follow, on ? "Follow" : "Frozen");
    changed();
  }

  function fit() {
    setFollow(false);
    view.start = firstTime(state.scene);
    view.end = Math.max(state.metrics.t, view.start + SHORTEST);
  }

  function zoom(factor, share = 0.5) {
    setFollow(false);
    const span = view.end - view.start;
    const wanted = Math.max(SHORTEST, Math.min(span * factor, Math.max(state.metrics.t * 1.5, 1e8)));
    view.start += (span - wanted) * share;
    view.end = view.start + wanted;
  }

  function move(share) {
    setFollow(false);
    const by = (view.end - view.start) * share;
    view.start += by;
    view.end += by;
  }

  /** Glide towards the latest rounds; true while still on the way. */
  function chase() {
    const rounds = state.scene.rounds.slice(-Math.max(2, Math.round(picture.width / ROUND_WIDTH)));
    const latest = state.metrics.t;
    const first = rounds.length ? rounds[0].start : firstTime(state.scene);
    const target = { start: Math.min(first, latest - SHORTEST), end: latest + (latest - first) * 0.02 };
    const jump = reducedMotion() || Math.abs(target.end - view.end) > 3 * (target.end - target.start);
    const step = jump ? 1 : 0.22;
    view.start += (target.start - view.start) * step;
    view.end += (target.end - view.end) * step;
    const left = Math.abs(target.end - view.end) + Math.abs(target.start - view.start);
    return left > (view.end - view.start) / 2000;
  }

  function draw(figures) {
    panel.say(sentence(figures));
    const { overlapped_ns: hidden, transfer_ns: all, overlap } = figures.overlap;
    setText(formula, all
      ? `overlap = time of transfers under compute / time of transfers = ${duration(hidden)} / ${duration(all)} = ${percent(overlap)}`
      : "overlap = time of transfers under compute / time of transfers");
    stale = true;
  }

  /** Every frame: only paints when something changed or the picture glides. */
  function frame() {
    const gliding = view.follow && chase();
    if ((stale || gliding) && picture.width) {
      stale = false;
      pattern ??= hatch(picture.context, looks.stall);
      drawTimeline(picture, view, state.scene, looks, pattern, selection);
    }
    return gliding;
  }

  selection.subscribe(({ current, chosen, from }) => {
    if (chosen && from !== "timeline") show(roundsOf(current, state.scene));
    changed();
  });

  /** Bring the first of the rounds into view, with some of its neighbours, if none of them is. */
  function show(numbers) {
    const rounds = state.scene.rounds.filter(({ round }) => numbers?.has(round));
    if (!rounds.length || rounds.some((round) => round.end >= view.start && round.start <= view.end)) return;
    setFollow(false);
    const span = Math.max(view.end - view.start, rounds[0].end - rounds[0].start);
    view.start = rounds[0].start - span / 3;
    view.end = view.start + span;
  }

  /** Choose the round `by` places from the one that is chosen, or the last one. */
  function step(by) {
    const { rounds } = state.scene;
    const numbers = selection.current && roundsOf(selection.current, state.scene);
    const at = rounds.findIndex(({ round }) => numbers?.has(round));
    const next = rounds[at < 0 ? rounds.length - 1 : at + by];
    if (next) selection.choose({ kind: "round", round: next.round }, "keys");
  }

  function pick(x, y) {
    const what = choiceAt(picture, view, state.scene, x, y);
    if (what) selection.choose(what, "timeline");
  }

  listen(picture, { view, zoom, move, fit, setFollow, toggle: () => setFollow(!view.follow), tip, state, changed, step, pick });
  return {
    root: panel.root,
    draw,
    frame,
    refreshTable: panel.refreshTable,
    reset() {
      Object.assign(view, { start: 0, end: 1e8 });
      setFollow(true);
      tip.hide();
    },
  };
}

function listen(picture, { view, zoom, move, fit, toggle, tip, state, setFollow, changed, step, pick }) {
  const { node } = picture;
  const pointers = new Map();
  let travelled = 0;
  const share = (event) => {
    const area = plotArea(picture.width);
    return Math.max(0, Math.min(1, (event.offsetX - area.left) / area.width));
  };
  node.addEventListener("wheel", (event) => {
    // Only once the picture was clicked (or with Ctrl), so that scrolling the page does not get stuck here.
    if (document.activeElement !== node && !event.ctrlKey) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX || event.deltaY) / 1500);
    else zoom(Math.exp(event.deltaY / 500), share(event));
  }, { passive: false });
  node.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX);
    travelled = 0;
    node.setPointerCapture(event.pointerId);
  });
  for (const type of ["pointerup", "pointercancel"]) node.addEventListener(type, (event) => pointers.delete(event.pointerId));
  node.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return hover(event);
    const before = [...pointers.values()];
    travelled += Math.abs(event.offsetX - pointers.get(event.pointerId));
    const dx = event.offsetX - pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    if (pointers.size === 2) {
      const after = [...pointers.values()];
      zoom(Math.abs(before[0] - before[1]) / Math.max(8, Math.abs(after[0] - after[1])));
    } else if (dx && travelled > CLICK) {
      move(-dx / plotArea(picture.width).width);
    }
  });
  node.addEventListener("pointerleave", () => tip.hide());
  node.addEventListener("click", (event) => travelled <= CLICK && pick(event.offsetX, event.offsetY));
  node.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const action = KEYS[key];
    if (key === "f") fit();
    else if (key === " ") toggle();
    else if (key === "n" || key === "b") step(key === "n" ? 1 : -1);
    else if (key === "End") setFollow(true);
    else if (action === "in" || action === "out") zoom(action === "in" ? 0.6 : 1 / 0.6);
    else if (action) move(action === "left" ? -0.15 : 0.15);
    else return;
    event.preventDefault();
    changed();
  });

  function hover(event) {
    const lines = sliceAt(picture, view, state.scene, event.offsetX, event.offsetY);
    if (lines) tip.show(event.offsetX, event.offsetY, lines);
    else tip.hide();
  }
}

function createKey() {
  return legend([
    ...LANES.map(({ id, label }) => [`sv-lane-${id}`, label]),
    ["sv-lane-stall", "stall: the engine waits"],
    ["sv-lane-wasted", "wasted or cancelled"],
    ["sv-lane-knob", "a knob took effect"],
  ]);
}

const firstTime = (scene) => scene.slices[0]?.start ?? scene.transfers[0]?.start ?? 0;

function sentence({ overlap, time, experts }) {
  if (!overlap.transfer_ns) return "Compute and transfers appear here once experts move.";
  const why = `${integer(experts.misses)} were asked for when they were neither in fast memory nor on their way, ${integer(experts.late)} were still on the link`;
  const waited = time.decode_ns ? `The engine stood still for ${percent(time.stall_share)} of the time, waiting for experts: ${why}.` : "";
  return `${percent(overlap.overlap)} of the transfer time was hidden under compute. ${waited}`;
}

function timelineTable(scene) {
  const rows = [
    ...scene.slices.slice(-150).map((s) => [s.start, s.pass, s.op, s.layer, null, s.end - s.start, s.round, null]),
    ...scene.stalls.slice(-50).map((s) => [s.start, "stall", null, s.layer, null, s.end - s.start, s.round, null]),
    ...scene.transfers.slice(-100).map((s) => [s.start, "link", s.cause, s.layer, s.expert, s.end - s.start, s.round, s.outcome]),
  ].sort((a, b) => a[0] - b[0]);
  return {
    head: ["start", "lane", "what", "layer", "expert", "time", "round", "outcome"],
    rows: rows.map((row) => [duration(row[0]), ...row.slice(1, 5).map((cell) => (cell === null ? cell : value(cell))), duration(row[5]), row[6], row[7]]),
  };
}
