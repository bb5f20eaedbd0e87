// The entry: mounts the page into #specviz-root and offers window.specviz to Gradio's handlers.
//
//   attach({run, token})   show a live run        feed(batch)    a batch that came through the generator
//   replay({url, label})   play a recording       detach()       let go of the run
//   watch(room)            see the runs of somebody else's page
//   open(file)             play a recording that somebody chose, with no server and no model
//   picture("svg" | "png") all figures as a Blob
//   clicked()              start the next run's clock at the click, before it has a number
//   set(name, value), stop()                      commands over the websocket; false when it is not open

import { el } from "./dom.js";
import { drawPng, drawSvg } from "./pictures.js";
import { readEvents, readText } from "./recording.js";
import { Replay } from "./replay.js";
import { Stage } from "./stage.js";
import { themeChanged, watchTheme } from "./theme.js";
import { Transport } from "./transport.js";

const BASE = import.meta.url;
const RECORDING = new URL("../recording.ndjson", BASE).href;
const STYLES = ["specviz.css", "frame.css", "header.css", "tokens.css", "panels.css", "compare.css", "whatif.css", "tour.css"];

class SpecViz {
  #stage = new Stage();
  #transport = null;
  #request = 0;
  #clicked = null;

  get state() {
    return this.#stage.state;
  }

  get selection() {
    return this.#stage.selection;
  }

  get root() {
    return this.#stage.root;
  }

  clicked() {
    this.#clicked = performance.now();
  }

  attach({ run, token, rejoined = false, compare = null }) {
    if (this.state.run === run && this.#transport) return;
    // A run that goes on after a reload began before this page knows when.
    const began = rejoined ? null : (this.#clicked ?? performance.now());
    this.#clicked = null;
    this.#connect({ run, token }, { mode: "live", run, began });
    this.#stage.compare.begin(compare);
  }

  /** A side of the comparison that was over before the page was reloaded. */
  compared({ side, label }, events) {
    this.#stage.compare.recall(side, label, events);
  }

  get whatif() {
    return this.#stage.whatif;
  }

  /** See the runs of a room, one after the other. */
  watch(room) {
    this.#connect({ room }, { mode: "watching", began: null });
  }

  #connect(address, shown) {
    this.detach();
    this.#stage.reset();
    const stage = this.#stage;
    const { state } = stage;
    Object.assign(state, shown);
    this.#transport = new Transport({
      ...address,
      seq: () => state.metrics.seq,
      over: () => !address.room && ["finished", "stopped", "failed"].includes(state.metrics.run.status),
      handlers: {
        attach: (run) => {
          if (run === state.run) return;
          stage.reset();
          Object.assign(state, { run });
        },
        events: (events) => stage.add(events),
        mode: (mode) => {
          state.mode = mode === "live" ? shown.mode : mode;
          stage.refresh();
        },
        ack: (message) => {
          state.acks[message.name] = message;
          this.tell(null);
        },
        error: (message) => this.tell(message.message),
      },
    });
  }

  /** A sentence above the panels; null takes it away. */
  tell(message) {
    this.state.message = message;
    this.#stage.wake(true);
  }

  feed(batch) {
    this.#transport?.feed(batch);
  }

  set(name, value) {
    return this.#transport?.send({ op: "set", name, value }) ?? false;
  }

  stop() {
    return this.#transport?.send({ op: "stop" }) ?? false;
  }

  async replay({ url = RECORDING, label = "", autoplay = true } = {}) {
    this.detach();
    const request = this.#request;
    let events;
    try {
      const answer = await fetch(url);
      if (!answer.ok) throw new Error(`no recording could be loaded (${answer.status})`);
      events = readEvents(await answer.text());
    } catch (error) {
      // Someone may have started a run while the recording was on its way.
      if (request === this.#request) this.#show({ message: url === RECORDING ? null : error.message });
      return;
    }
    if (request === this.#request) this.#play(events, label, autoplay);
  }

  /** Resolves with the file's text; rejects, with the page as it was and the reason said, when it is no recording. */
  async open(file) {
    try {
      const text = await readText(file);
      const events = readEvents(text, file.name);
      this.detach();
      this.#play(events, file.name, true);
      return text;
    } catch (error) {
      this.#show({ message: error.message });
      throw error;
    }
  }

  async picture(format) {
    const { facts } = this.state.metrics;
    const told = facts ? `${facts.model.name} · ${facts.machine.cpu ?? ""} · ${facts.link.label}` : "SpecViz";
    const emulated = facts?.link.emulated && !/emulated/i.test(facts.link.label) ? " (emulated)" : "";
    const svg = await drawSvg(this.root, this.#stage.plotter.plots, told + emulated);
    return format === "png" ? drawPng(svg) : svg;
  }

  #play(events, label, autoplay) {
    const stage = this.#stage;
    stage.reset();
    const machine = events.find((event) => event.kind === "run_start")?.machine;
    const replay = new Replay(events, {
      events: (list) => stage.add(list),
      restart: () => stage.reset(),
    });
    stage.compare.begin(null);
    this.#show({ mode: "recording", label: label || machine?.cpu || "", replay });
    // People who asked for less motion get the finished run, and a button.
    if (autoplay && !window.matchMedia("(prefers-reduced-motion: reduce)").matches) replay.play();
    else replay.seek(replay.end);
    stage.refresh();
  }

  detach() {
    this.#request++;
    this.#transport?.close();
    this.#transport = null;
    Object.assign(this.state, { run: null, replay: null, mode: "idle", label: "", acks: {} });
    this.#stage.wake(true);
  }

  #show(change) {
    Object.assign(this.state, change);
    this.#stage.refresh();
  }
}

/** Put the page into its root whenever there is one: Gradio may build it later than us, and build it again. */
function mount(specviz) {
  const place = () => {
    if (specviz.root.isConnected) return;
    const root = document.getElementById("specviz-root");
    if (!root) return;
    // Gradio styles texts of its HTML component as an article, with rules that would win over ours.
    root.closest(".prose")?.classList.remove("prose");
    root.replaceChildren(specviz.root);
    themeChanged();
  };
  new MutationObserver(place).observe(document.documentElement, { childList: true, subtree: true });
  place();
}

/** Load the style sheets; the page shows when they are there, or when they failed. */
async function dress(root) {
  root.hidden = true;
  const sheets = STYLES.map((name) => el("link", { rel: "stylesheet", href: new URL(name, BASE).href }));
  const settled = sheets.map((sheet) => new Promise((resolve) => (sheet.onload = sheet.onerror = resolve)));
  document.head.append(...sheets);
  await Promise.all(settled);
  root.hidden = false;
  themeChanged();
}

if (!window.specviz) {
  window.specviz = new SpecViz();
  mount(window.specviz);
  dress(window.specviz.root);
  watchTheme();
  window.specviz.replay();
}
