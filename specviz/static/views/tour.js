// The guided tour: a bar that stays in sight, one step at a time.

import { button, el, setText } from "../dom.js";
import { reducedMotion } from "../theme.js";
import { STEPS } from "../tour.js";

/**
 * `apply(settings)` sets the controls, `ask(settings)` the what-if panel, `run()` presses Generate. `borrow()` and
 * `giveBack(names)`: settings are the visitor's again when the tour is over.
 */
export function createTour({ root: page, apply, ask, run, borrow, giveBack }) {
  let at = null;
  const start = button("Tour: eight steps", "A guided tour: what each panel shows, with settings to try", () => go(0));
  const count = el("span", { class: "sv-tour-count" });
  const title = el("h3", { class: "sv-tour-title", tabindex: "-1" });
  const text = el("p", {});
  const look = el("p", { class: "sv-tour-look" });
  const back = button("Back", "The step before", () => go(at - 1));
  const next = button("Next", "The next step", () => (at === STEPS.length - 1 ? close() : go(at + 1)));
  const again = button("Generate", "Run with the settings of this step", run);
  const root = el("aside", { class: "sv-tour", "aria-label": "Guided tour" },
    el("div", { class: "sv-tour-head" }, count, title, el("div", { class: "sv-actions" }, again, back, next, button("Close", "End the tour", close))),
    text, look);
  root.hidden = true;

  function mark(panel) {
    for (const node of page.querySelectorAll(".sv-toured")) node.classList.remove("sv-toured");
    const node = panel && page.querySelector(`.sv-panel-${panel}`);
    node?.classList.add("sv-toured");
    return node;
  }

  function go(step) {
    if (at === null) borrow();
    at = step;
    const { title: name, text: words, look: hint, panel, set, whatif, run: runs } = STEPS[at];
    setText(count, `${at + 1} of ${STEPS.length}`);
    setText(title, name);
    setText(text, words);
    setText(look, `Look for: ${hint}`);
    setText(next, at === STEPS.length - 1 ? "Done" : "Next");
    back.disabled = at === 0;
    again.hidden = !runs;
    root.hidden = false;
    start.hidden = true;
    if (set) apply(set);
    if (whatif) ask(whatif);
    // The bar sticks to the top: the panel goes below it.
    const node = mark(panel);
    if (node) {
      node.style.scrollMarginTop = `${root.offsetHeight + 12}px`;
      node.scrollIntoView({ behavior: reducedMotion() ? "auto" : "smooth", block: "start" });
    }
    title.focus({ preventScroll: true });
  }

  function close() {
    at = null;
    giveBack([...new Set(STEPS.flatMap(({ set = {} }) => Object.keys(set)))]);
    mark(null);
    root.hidden = true;
    start.hidden = false;
    start.focus();
  }

  return { root, start };
}
