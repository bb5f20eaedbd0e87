// The page: one state, all panels, one drawing loop. Events are reduced when they come, whether or not the
// page can be seen; pictures are only drawn on animation frames.

import { Baselines } from "./baselines.js";
import { el, setText } from "./dom.js";
import { number, percent, plural } from "./format.js";
import { Phases } from "./phases.js";
import { Plotter } from "./plots.js";
import { Metrics } from "./reducer.js";
import { Scene, promptText } from "./scene.js";
import { Selection } from "./selection.js";
import { onThemeChange } from "./theme.js";
import { createAcceptance } from "./views/acceptance.js";
import { createChosen } from "./views/chosen.js";
import { createCompare } from "./views/compare.js";
import { createExperts } from "./views/experts.js";
import { createGovernor } from "./views/governor.js";
import { createHeader, phaseText } from "./views/header.js";
import { createPlayer } from "./views/player.js";
import { createRoofline } from "./views/roofline.js";
import { createSpeed } from "./views/speed.js";
import { createStrip } from "./views/strip.js";
import { createTimeline } from "./views/timeline.js";
import { createTour } from "./views/tour.js";
import { createWhatIf } from "./views/whatif.js";

/** Texts and figures change at most this often, in ms; faster could not be read. */
const TEXT_EVERY = 120;
/** While a run is on, the clock ticks although no event comes. */
const CLOCK_EVERY = 100;

export class Stage {
  state = {
    mode: "idle", label: "", message: null, run: null, began: null, ended: null,
    metrics: new Metrics(), scene: new Scene(), figures: null, replay: null, acks: {}, baselines: new Baselines(), phases: new Phases(),
    get seq() {
      return this.metrics.seq;
    },
  };
  #scheduled = false;
  #drawn = -Infinity;
  #changed = true;
  #runs = 0;
  #said = "";

  constructor() {
    const { state } = this;
    const wake = (changed) => this.wake(changed === true);
    this.plotter = new Plotter(wake);
    const selection = (this.selection = new Selection());
    const context = { state, wake, plotter: this.plotter, selection };
    this.chosen = createChosen(context);
    const header = createHeader();
    const player = createPlayer({ player: () => state.replay, wake });
    header.tools.append(player.root);
    this.compare = createCompare(context);
    this.whatif = createWhatIf(context);
    this.views = [
      header, createStrip(context), createTimeline(context), createExperts(context), createAcceptance(context),
      createRoofline(context), createSpeed(context), createGovernor(context),
      this.compare, this.whatif, player,
    ];
    this.live = el("p", { class: "sv-live", role: "status", "aria-live": "polite" });
    const panels = this.views.slice(1, -1).map((view) => view.root);
    this.root = el("div", { class: "sv" }, header.root, el("div", { class: "sv-grid" }, ...panels), this.chosen.root, this.live);
    let asked = {};
    const tour = createTour({
      root: this.root,
      apply: (settings) => window.specvizBridge?.apply(settings),
      ask: (settings) => this.whatif.set(settings),
      run: () => document.querySelector("#sv-generate")?.click(),
      borrow: () => {
        asked = this.whatif.values();
        window.specvizBridge?.borrow();
      },
      giveBack: (names) => {
        this.whatif.restore(asked);
        window.specvizBridge?.giveBack(names);
        Object.assign(state, { message: "The tour is over: the settings are those that you had before it." });
        this.wake(true);
      },
    });
    header.tour.append(tour.start);
    header.root.after(tour.root);
    onThemeChange(() => {
      this.plotter.invalidate(true);
      this.wake();
    });
    // Whoever looks closer does not want the recording to begin again under their hands.
    this.root.addEventListener("pointerdown", () => state.replay && (state.replay.loop = false));
    document.addEventListener("visibilitychange", () => {
      // Frames stopped while the page was hidden, and one that was asked for may never come; the state went on.
      if (document.hidden) return;
      this.#scheduled = false;
      this.refresh();
    });
    setInterval(() => this.#running() && this.wake(true), CLOCK_EVERY);
    this.wake();
  }

  /** Forget the run shown, e.g. because another one starts. */
  reset() {
    Object.assign(this.state, { metrics: new Metrics(), scene: new Scene(), phases: new Phases(), message: null, ended: null });
    this.selection.clear();
    this.#runs++;
    for (const view of this.views) view.reset?.();
    this.plotter.invalidate(true);
    this.refresh();
  }

  /** Take events, in order. */
  add(events) {
    const { metrics, scene, phases, mode, baselines } = this.state;
    for (const event of events) {
      if (!metrics.add(event)) continue;
      scene.add(event);
      phases.add(event);
      this.compare.add(event);
      if (event.kind === "run_end" && mode !== "recording") baselines.note(metrics.toJSON(), promptText(scene));
    }
    this.wake(true);
  }

  /** Draw with the next frame; `changed` when figures may have changed. */
  wake(changed = false) {
    this.#changed ||= changed;
    if (this.#scheduled) return;
    this.#scheduled = true;
    requestAnimationFrame(this.#tick);
  }

  /** Draw everything anew. */
  refresh() {
    this.#drawn = -Infinity;
    this.wake(true);
  }

  #running() {
    const { mode, metrics } = this.state;
    return mode !== "idle" && mode !== "recording" && !["finished", "stopped", "failed"].includes(metrics.run.status);
  }

  #tick = (now) => {
    this.#scheduled = false;
    const { state } = this;
    if (state.replay) {
      state.replay.tick(now);
      this.#changed ||= state.replay.playing;
    }
    if (this.#changed && now - this.#drawn >= TEXT_EVERY) {
      this.#changed = false;
      this.#drawn = now;
      state.figures = state.metrics.toJSON();
      for (const view of this.views) view.draw(state.figures, state, now);
      this.#announce();
    }
    let busy = Boolean(state.replay?.playing) || this.#changed;
    if (state.figures) {
      for (const view of this.views) {
        view.refreshTable?.(now);
        busy = view.frame?.(now) || busy;
      }
      busy = this.plotter.frame(now, `run-${this.#runs}`) || busy;
    }
    if (busy) this.wake();
  };

  /** Only milestones are read aloud, and not those of a recording that plays by itself. */
  #announce() {
    const { figures, mode } = this.state;
    if (mode === "recording" || mode === "idle") return;
    let text = `Run ${phaseText(figures)}`;
    if (figures.run.status === "loading") text = "Loading the model";
    if (["finished", "stopped"].includes(figures.run.status)) {
      const { time, acceptance, overlap } = figures;
      text += `: ${plural(acceptance.emitted, "token")} at ${number(time.mean_rate)} tokens/s, overlap ${percent(overlap.overlap)}`;
    }
    if (text !== this.#said) setText(this.live, (this.#said = text));
  }
}
