// My model on that GPU: settings on top, tokens/s of every policy, one iteration as lanes, the roofs above it.

import { el, legend, setText } from "../dom.js";
import { number, percent, spaced } from "../format.js";
import { createPanel, createTable } from "../panel.js";
import { Plot } from "../plots.js";
import { colours } from "../theme.js";
import { ask, contest, DRAFTING, verdict } from "../whatif.js";
import { createIteration } from "./iteration.js";
import { roofsFigure, roofsLegend } from "./roofs.js";
import { createWhatIfSettings } from "./whatif_settings.js";

const PATIENCE = 120;

export function createWhatIf({ plotter, wake }) {
  let report = null;
  let chosen = null;
  let asked = null;
  let timer = null;
  const panel = createPanel({
    id: "whatif",
    title: "What if",
    question: "My model on that GPU: would speculation pay?",
    table: () => policyTable(report),
  });
  const settings = createWhatIfSettings(() => {
    clearTimeout(timer);
    timer = setTimeout(refresh, PATIENCE);
  });
  const policies = el("div", { class: "sv-policies", role: "group", "aria-label": "Tokens a second of each policy" });
  const caption = el("h4", {});
  const iteration = createIteration(wake);
  const plot = new Plot({
    label: "Hierarchical roofline: TFLOP/s that the roofs allow against FLOP a byte", height: 300, plotter,
    figure: () => roofsFigure(report, colours(panel.root)),
  });
  const roofs = el("div", {});
  const papers = createPapers();
  panel.body.append(settings.root, policies, el("div", { class: "sv-pair" }, el("div", {}, caption, iteration.root), el("div", {},
    el("h4", { text: "Hierarchical roofline: which roof each phase meets" }), plot.node, roofs)), papers,
  el("p", { class: "sv-hint", text: "A prediction: every operator as fast as the profile's roofs allow, experts drawn at random (the worst case: real text asks again for those that it just used). No kernel is faster, real ones are slower. Profiles and their sources are in assets/profiles." }));
  panel.say("Choose a machine and a model: the simulator answers without loading anything.");
  // Nothing is asked before somebody looks.
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    begin();
  }).observe(panel.root);

  async function begin() {
    try {
      settings.fill(await ask("choices"));
      await refresh();
    } catch (error) {
      panel.say(`The simulator cannot be asked: ${error.message}`);
    }
  }

  async function refresh() {
    asked?.abort();
    const fault = settings.fault();
    if (fault) return settings.complain(fault);
    const request = (asked = new AbortController());
    try {
      report = await ask("simulate", settings.values(), request.signal);
      settings.complain("");
      const { plain, drafting } = contest(report);
      const fits = report.policies.find((policy) => policy.policy === chosen && policy.spans.length);
      show(fits ?? drafting ?? plain ?? report.policies[0]);
      panel.say(verdict(report));
    } catch (error) {
      if (error.name !== "AbortError") settings.complain(error.message);
    }
  }

  function show(policy) {
    chosen = policy.policy;
    policies.replaceChildren(...policyBars(report, chosen, show));
    setText(caption, policy.spans.length
      ? `One iteration of ${policy.policy}: ${seconds(policy.iteration_s)} for ${plural(policy.tokens)}`
      : `${policy.policy} does not fit`);
    iteration.show(policy);
    roofs.replaceChildren(legend(roofsLegend(report)));
    plot.invalidate(true);
    wake();
  }

  return {
    root: panel.root, draw() {}, frame: iteration.frame, settings, refreshTable: panel.refreshTable,
    values: settings.values,
    /** Take settings (of a tour or a link) and answer them when somebody looks. */
    set(values) {
      settings.set(values);
      if (report) refresh();
    },
    /** Take what `values` gave before. */
    restore(values) {
      settings.restore(values);
      if (report) refresh();
    },
  };
}

const seconds = (value) => (value >= 1 ? `${number(value)} s` : `${number(value * 1e3)} ms`);
const plural = (tokens) => `${number(tokens)} token${tokens === 1 ? "" : "s"}`;

/** One button a policy: its bar, its figure, what binds. A chosen one shows its iteration below. */
function policyBars({ policies }, chosen, show) {
  const most = Math.max(...policies.map((policy) => policy.tokens_per_second ?? 0)) || 1;
  return policies.map((policy) => {
    const rate = policy.tokens_per_second;
    const kind = DRAFTING.includes(policy.policy) ? "drafting" : "plain";
    return el("button", {
      type: "button", class: "sv-policy", "aria-pressed": String(policy.policy === chosen),
      title: `Show an iteration of ${policy.policy}`, on: { click: () => show(policy) },
    },
    el("span", { class: "sv-policy-name", text: policy.policy }),
    el("span", { class: "sv-policy-track" }, el("i", { class: `sv-policy-${kind}`, style: `width:${(100 * (rate ?? 0)) / most}%` })),
    el("b", { class: "sv-policy-rate", text: rate === null ? "–" : `${number(rate)} tokens/s` }),
    el("span", { class: "sv-policy-why", text: spaced(policy.reason) }));
  });
}

function policyTable(report) {
  return {
    head: ["policy", "tokens/s", "iteration", "tokens", "draft", "slots a layer", "lanes at work", "what binds"],
    rows: (report?.policies ?? []).map((p) => [
      p.policy, p.tokens_per_second && number(p.tokens_per_second), p.iteration_s && seconds(p.iteration_s),
      p.tokens && number(p.tokens), p.iteration_s && seconds(p.draft_s), p.slots || null,
      p.busy && Object.entries(p.busy).map(([lane, share]) => `${lane} ${percent(share)}`).join(", "), p.reason,
    ]),
  };
}

/** The papers' tables beside ours, fetched when they are opened. */
function createPapers() {
  const place = el("div", { class: "sv-table", tabindex: "0", role: "region", "aria-label": "The papers' figures beside ours" });
  const said = el("p", { class: "sv-hint" });
  const root = el("details", { class: "sv-papers" }, el("summary", { text: "The papers' tables: theirs and ours, side by side" }), said, place);
  root.addEventListener("toggle", async () => {
    if (!root.open || place.childElementCount) return;
    try {
      const { rows, counts } = await ask("papers");
      setText(said, `${counts.given} of ${counts.figures} figures follow from published inputs, ${counts.within_10_percent} of them within 10 %. For the others an input is missing (“nearest” is what the nearest published one gives). Nothing is fitted.`);
      place.replaceChildren(createTable({
        head: ["source", "what", "unit", "paper", "ours", "error", "nearest", "why"],
        rows: rows.map((row) => [row.source, row.what, row.unit, figure(row.paper), figure(row.ours), error(row.error), figure(row.nearest), row.why ?? ""]),
      }, "The papers' figures beside ours"));
    } catch (failure) {
      setText(said, failure.message);
    }
  });
  return root;
}

const figure = (value) => (value === null ? null : String(Number(value.toPrecision(4))));
const error = (share) => (share === null ? null : `${share < 0 ? "−" : "+"}${Math.abs(share * 100).toFixed(1)} %`);
