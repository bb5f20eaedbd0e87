// The big numbers, what the run is doing, and the facts needed to read everything else.

import { button, el, setText } from "../dom.js";
import { DASH, bytes, clock, duration, integer, number, percent, plural, value } from "../format.js";
import { createPace } from "../pace.js";

const MODES = {
  idle: ["waiting", "No run yet"],
  live: ["live", "Events come over a websocket"],
  watching: ["watching", "Somebody else's runs, as they see them; you can look closer at everything and change nothing"],
  compat: ["compat mode", "The websocket did not open: the same events come through Gradio's own stream"],
  reconnecting: ["reconnecting", "The connection broke; it resumes where it was"],
  recording: ["recording", "A recorded real run, played again"],
};
const MEMORY = ["shared", "draft", "cache", "kv"];
const MEMORY_LABELS = { shared: "shared weights", draft: "draft", cache: "cache slots", kv: "KV" };

const TILES = [
  ["rate", "Speed", "tokens/s", "Tokens emitted in the last second; below, over the whole run, which a run that is over shows alone"],
  ["length", "Accepted length", "tokens a round", "1 + accepted draft tokens / rounds that drafted"],
  ["hits", "Expert hit rate", "of requests", "(hits + late) / requests; late ones were still on the link when needed"],
  ["overlap", "Overlap", "of transfer time", "Time of transfers that ran under compute / time of transfers"],
  ["stall", "Stall", "of decoding time", "Time that the engine waited for an expert / time of decoding"],
];

/** The header. `draw(figures, state, now)`; `tools` is where the replay controls go, `tour` the tour's button. */
export function createHeader() {
  const badge = el("span", { class: "sv-badge" });
  const phase = el("span", { class: "sv-phase" });
  const time = el("span", { class: "sv-clock" });
  const change = el("span", { class: "sv-change" });
  const tools = el("div", { class: "sv-tools" });
  const tour = el("div", { class: "sv-tour-start" });
  // Where the controls are far above, on a phone.
  const stop = button("Stop", "Stop the run", () => document.querySelector("#sv-stop")?.click());
  stop.classList.add("sv-stop-near");
  stop.hidden = true;
  const progress = el("progress", { class: "sv-progress", max: 1, "aria-label": "Loading the model" });
  const notice = el("p", { class: "sv-notice", role: "alert" });
  const tiles = Object.fromEntries(TILES.map((tile) => [tile[0], createTile(...tile)]));
  const facts = el("dl", { class: "sv-facts" });
  const memory = el("div", { class: "sv-memory" });
  const root = el(
    "section",
    { class: "sv-header", "aria-label": "The run at a glance" },
    el("div", { class: "sv-status" }, badge, phase, time, progress, change, stop, tour),
    tools,
    notice,
    el("div", { class: "sv-tiles" }, ...Object.values(tiles).map((tile) => tile.root)),
    el("div", { class: "sv-about" }, facts, memory),
  );
  const pace = createPace();
  let known = null;

  function draw(figures, state, now) {
    const [name, title] = MODES[state.mode];
    setText(badge, state.mode === "recording" && state.label ? `recording · ${state.label}` : name);
    badge.dataset.mode = state.mode;
    badge.title = title;
    setText(phase, phaseText(figures, state.mode === "recording" ? null : pace(figures.load, now), state.scene.phase));
    setText(time, clockText(figures, state, now));
    drawProgress(figures);
    setText(change, changeText(figures.knobs, state.acks));
    const missing = figures.lost ? `${plural(figures.lost, "event")} did not arrive: figures are a little low.` : "";
    setText(notice, figures.run.error ?? state.message ?? connectionText(state.scene.connection) ?? missing);
    notice.hidden = !notice.textContent;
    notice.dataset.tone = figures.run.error || missing ? "error" : "note";
    stop.hidden = !["live", "compat"].includes(state.mode) || ["finished", "stopped", "failed"].includes(figures.run.status);
    drawTiles(figures);
    if (figures.facts !== known || figures.experts.slots_per_layer !== facts.slots) {
      known = figures.facts;
      facts.slots = figures.experts.slots_per_layer;
      drawFacts(facts, memory, figures);
    }
  }

  function drawProgress({ run, load }) {
    progress.hidden = run.status !== "loading" || !load;
    if (progress.hidden) return;
    if (load.total_bytes) progress.value = load.done_bytes / load.total_bytes;
    else progress.removeAttribute("value");
  }

  function drawTiles({ run, time: times, acceptance, experts, overlap }) {
    // The last second of a run that is over, often a short round, is no answer to how fast it was.
    const whole = ["finished", "stopped"].includes(run.status);
    const tokens = plural(acceptance.emitted, "token");
    if (whole) tiles.rate.set(number(times.mean_rate), `whole run · ${tokens}`);
    else tiles.rate.set(number(times.rate), `mean ${number(times.mean_rate)} · ${tokens}`);
    const { mean_length: length, rate } = acceptance;
    tiles.length.set(number(length), length === null ? (whole ? "nothing was drafted" : "no draft yet") : `${percent(rate)} of verified drafts accepted`);
    const late = experts.requests ? experts.late / experts.requests : null;
    tiles.hits.set(percent(experts.hit_rate), late === null ? "no request yet" : `${percent(late)} late · ${integer(experts.misses)} missed`);
    const { overlapped_ns: hidden, transfer_ns: all } = overlap;
    tiles.overlap.set(percent(overlap.overlap), all ? `${duration(hidden)} of ${duration(all)}` : "no transfer yet");
    tiles.stall.set(percent(times.stall_share), times.decode_ns ? `${duration(times.stall_ns)} of ${duration(times.decode_ns)}` : "no round yet");
  }

  return { root, tools, tour, draw, reset: () => (known = null) };
}

function createTile(id, label, unit, title) {
  const figure = el("span", { class: "sv-tile-value", text: DASH });
  const sub = el("span", { class: "sv-tile-sub", text: " " });
  const root = el(
    "div",
    { class: `sv-tile sv-tile-${id}`, title },
    el("span", { class: "sv-tile-label", text: label }),
    el("span", { class: "sv-tile-line" }, figure, el("span", { class: "sv-tile-unit", text: unit })),
    sub,
  );
  return {
    root,
    set(text, below) {
      setText(figure, text);
      setText(sub, below);
    },
  };
}

/** Where the run is, in a word or two. */
export function phaseText({ run, load }, rate = null, phase = null) {
  if (run.status === "loading" && load) {
    const share = load.total_bytes ? ` ${percent(load.done_bytes / load.total_bytes)} of ${bytes(load.total_bytes)}` : "";
    const left = load.total_bytes && rate ? ` · ${bytes(rate)}/s · ${clock((load.total_bytes - load.done_bytes) / rate)} left` : "";
    return `loading ${load.stage}${share}${left}`;
  }
  if (run.status === "waiting") return phase?.detail ? `queued, ${phase.detail}` : "queued";
  if (run.status === "running") return { prefill: "reading the prompt", decode: "decoding" }[run.phase] ?? run.phase ?? "starting";
  return run.status;
}

/** What a person must know of the way to an engine on another machine; null when all is well. */
function connectionText(connection) {
  if (!connection) return null;
  if (!connection.connected) return "The connection to the engine broke. The run goes on there; it resumes here without a gap.";
  const late = connection.behind_s >= 0.5;
  const behind = late ? `The network is slower than the engine: what you see is ${number(connection.behind_s)} s old. ` : "";
  const lost = connection.lost ? `${plural(connection.lost, "event")} did not arrive: figures are a little low.` : "";
  return behind + lost || null;
}

function clockText({ run, t }, state, now) {
  if (state.mode === "recording") return clock(t / 1e9);
  if (state.began === null) return t ? clock(t / 1e9) : "";
  const over = ["finished", "stopped", "failed"].includes(run.status);
  if (over) state.ended ??= now;
  return clock(((over ? state.ended : now) - state.began) / 1000);
}

/** What became of the knob moved last: asked for (the server has it), or in effect since a round. */
function changeText(knobs, acks) {
  const done = knobs[knobs.length - 1];
  const asked = Object.values(acks).reduce((a, b) => (b.version > (a?.version ?? 0) ? b : a), null);
  if (asked && asked.version > (done?.version ?? 0)) return `${asked.name} ${value(asked.value)} asked for`;
  return done ? `${done.name} ${value(done.old)} → ${value(done.new)} since round ${done.round}` : "";
}

function drawFacts(facts, memory, { facts: run, experts }) {
  facts.replaceChildren();
  memory.replaceChildren();
  if (!run) return;
  const { model, link, config, machine } = run;
  const rows = [
    ["Model", `${model.name} · ${model.moe_layers} layers × ${model.experts} experts, top-${model.top_k} · ${model.dtype}`],
    ["Expert", `${bytes(model.expert_bytes)} on the link`],
    ["Slots", `${experts.slots_per_layer} of ${model.experts} a layer`],
    ["Link", link.emulated && !/emulated/i.test(link.label) ? `${link.label} (emulated)` : link.label],
    ["Draft", config.draft],
    ["Machine", [machine.cpu, machine.cores && plural(machine.cores, "core"), machine.device].filter(Boolean).join(" · ")],
    ["Kernels", machine.kernels],
  ];
  // What does not stand for this machine at its best is marked.
  const marked = { Link: link.emulated, Kernels: machine.kernels?.startsWith("torch") };
  for (const [term, text] of rows) {
    if (text === undefined || text === null) continue;
    const name = marked[term] ? "sv-fact sv-marked" : "sv-fact";
    facts.append(el("div", { class: name }, el("dt", { text: term }), el("dd", { text: String(text) })));
  }
  drawMemory(memory, memoryNow(run, experts.slots_per_layer));
}

/** Bytes of fast memory: the run began with `memory`, and slots that were given or taken since count. */
export function memoryNow({ memory, slots_per_layer: first }, slots) {
  if (!first || !slots || slots === first) return memory;
  const cache = (memory.cache * slots) / first;
  return { ...memory, cache, total: memory.total + cache - memory.cache };
}

function drawMemory(node, memory) {
  const total = memory.total || MEMORY.reduce((all, part) => all + (memory[part] ?? 0), 0);
  if (!total) return;
  const words = MEMORY.map((part) => `${MEMORY_LABELS[part]} ${bytes(memory[part] ?? 0)}`).join(", ");
  const bar = el("div", { class: "sv-bar", role: "img", "aria-label": `Fast memory ${bytes(total)}: ${words}` });
  const legend = el("div", { class: "sv-bar-legend" }, el("span", { text: `Fast memory ${bytes(total)}` }));
  for (const part of MEMORY.filter((part) => memory[part])) {
    const share = memory[part] / total;
    bar.append(el("span", { class: `sv-bar-part sv-memory-${part}`, style: `flex-grow:${share}` }));
    legend.append(
      el("span", { class: "sv-key" }, el("i", { class: `sv-swatch sv-memory-${part}` }), `${MEMORY_LABELS[part]} ${bytes(memory[part])}`),
    );
  }
  node.append(bar, legend);
}
