// What is chosen, in a sentence that stays in sight, with a way out.

import { button, el, setText } from "../dom.js";
import { describe } from "../selection.js";

export function createChosen({ state, selection }) {
  const words = el("span", { class: "sv-chosen-words" });
  const root = el("aside", { class: "sv-chosen", "aria-label": "What is chosen" }, words, button("Clear", "Let go of what is chosen (Escape)", () => selection.clear()));
  root.hidden = true;
  selection.subscribe(({ current, chosen }) => {
    root.hidden = !chosen;
    if (chosen) setText(words, describe(current, state.scene));
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && selection.clear());
  return { root };
}
