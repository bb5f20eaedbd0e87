// One simulated iteration as lanes: what each resource did, and when.

import { canvas, el, legend, tooltip } from "../dom.js";
import { duration, percent } from "../format.js";
import { FONT } from "../plots.js";
import { colours, onThemeChange } from "../theme.js";

const ORDER = ["gpu", "cpu", "link", "disk"];
const TOP = 8;
const LANE = 38;
const BAR = 24;
const BOTTOM = 26;
const LEFT = 46;
/** What a task is called in the simulator → the colour that the live timeline has for it. */
const COLOURS = {
  draft: "draft", "draft head": "draft", "draft on the GPU": "draft", "draft on the CPU": "draft",
  shared: "attention", attention: "attention", activations: "demand", rest: "attention", head: "attention",
  resident: "experts", expert: "experts", experts: "experts", others: "muted",
  load: "demand", prefetch: "prefetch", weights: "prefetch",
};

/** `show(policy)` takes one of the report's policies; `frame()` paints when there is a reason to. */
export function createIteration(wake) {
  let policy = null;
  let stale = true;
  let looks = null;
  const picture = canvas({ role: "img", tabindex: "0", "aria-label": "One iteration, lane by lane" }, TOP + 3 * LANE + BOTTOM, () => redraw());
  const tip = tooltip(picture.box);
  const root = el("div", {}, picture.box, legend([
    ["sv-lane-draft", "draft"], ["sv-lane-attention", "attention and shared weights"], ["sv-lane-experts", "experts"],
    ["sv-lane-demand", "asked for: waited for"], ["sv-lane-prefetch", "fetched ahead"],
  ]));

  const lanes = () => ORDER.filter((lane) => policy?.busy?.[lane] !== undefined);
  const scale = () => (picture.width - LEFT - 8) / (policy.iteration_s || 1);
  onThemeChange(() => {
    looks = null;
    redraw();
  });

  function redraw() {
    stale = true;
    wake();
  }

  function show(next) {
    policy = next;
    const words = lanes().map((lane) => `${lane} works ${percent(policy.busy[lane])} of the time`).join(", ");
    picture.node.setAttribute("aria-label", policy.spans.length ? `One iteration of ${policy.policy}: ${words}` : policy.reason);
    picture.setHeight(TOP + Math.max(1, lanes().length) * LANE + BOTTOM);
    redraw();
  }

  function frame() {
    if (!stale || !picture.width || !policy) return false;
    stale = false;
    looks ??= colours(root);
    paint(picture, policy, lanes(), scale(), looks);
    return false;
  }

  picture.node.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const lane = lanes()[Math.floor((offsetY - TOP) / LANE)];
    const t = (offsetX - LEFT) / scale();
    const grace = 2 / scale();
    const span = policy?.spans.findLast(([where, , start, end]) => where === lane && start - grace <= t && t <= end + grace);
    if (span) tip.show(offsetX, offsetY, [`${span[1]} on ${lane}`, `${duration(span[4] * 1e9)} of work, ${duration(span[2] * 1e9)} to ${duration(span[3] * 1e9)}`]);
    else tip.hide();
  });
  picture.node.addEventListener("pointerleave", () => tip.hide());
  return { root, show, frame };
}

function paint({ context: pen, width, height }, policy, lanes, scale, looks) {
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${FONT}`;
  pen.textBaseline = "middle";
  if (!policy.spans.length) return;
  lanes.forEach((lane, row) => {
    const y = TOP + row * LANE;
    pen.fillStyle = looks.faint;
    pen.fillRect(LEFT, y, width - LEFT - 8, LANE - 4);
    pen.fillStyle = looks.muted;
    pen.textAlign = "left";
    pen.fillText(lane, 0, y + LANE / 2 - 7);
    pen.fillText(percent(policy.busy[lane]), 0, y + LANE / 2 + 8);
  });
  for (const [lane, name, start, end, work] of policy.spans) {
    // A stretch of many short tasks is as dark as it is full.
    pen.globalAlpha = 0.15 + (0.85 * work) / (end - start);
    pen.fillStyle = looks[COLOURS[name]] ?? looks.muted;
    const y = TOP + lanes.indexOf(lane) * LANE + (LANE - 4 - BAR) / 2;
    pen.fillRect(LEFT + start * scale, y, Math.max(0.5, (end - start) * scale), BAR);
  }
  pen.globalAlpha = 1;
  pen.fillStyle = looks.muted;
  const marks = width < 420 ? 2 : 4;
  for (let i = 0; i <= marks; i++) {
    pen.textAlign = i === 0 ? "left" : i === marks ? "right" : "center";
    pen.fillText(duration((policy.iteration_s * 1e9 * i) / marks), LEFT + (i / marks) * (width - LEFT - 8), height - 10);
  }
}
