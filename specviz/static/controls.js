// What Gradio's own events ask of the page's controls: values that are missing, and settings that come from elsewhere.

import { askedIn, fromAddress, merge, named, permalink, read } from "./settings.js";

const numbers = new Map();

/** A knob's number; a box that was emptied, as by someone about to type another one, stands for the last it had. */
export function number(name, value, first) {
  if (typeof value === "number") numbers.set(name, value);
  return numbers.get(name) ?? first;
}

/** The values of a run's inputs, with `first` where a box is empty. */
export function clicked(values, first) {
  window.specviz?.clicked?.();
  return values.map((value, i) => value ?? first[i]);
}

let wanted = {};
let shown = null; // settings that came from the run itself
let lent = null; // {} from the tour's beginning on, {values} of the controls once they said so, and the names to give back

/** Set controls; live knobs reach a run that is on. Gradio's own button carries it, so that its values change. */
export function apply(settings) {
  wanted = settings;
  document.querySelector("#sv-apply")?.click();
}

/** Show the settings of a run that is on already: nothing is sent to it. */
export function show(settings) {
  shown = settings;
  apply(settings);
}

/** Remember what the controls show when settings are applied next, for `giveBack`. */
export function borrow() {
  lent = {};
}

/** Set the controls `names` to what they showed when they were borrowed. */
export function giveBack(names) {
  if (!lent?.values) return;
  lent.names = names;
  apply(Object.fromEntries(Object.entries(lent.settings).filter(([name]) => names.includes(name))));
}

/** The controls' values with the settings that wait to be applied. */
export function applied(values, schema) {
  if (lent && !lent.values) Object.assign(lent, { values, settings: read(values, schema) });
  const running = wanted !== shown && window.specviz?.state?.metrics.run.status === "running";
  for (const entry of running ? schema : []) {
    if (entry.live && Object.hasOwn(wanted, entry.name)) window.specviz.set(entry.name, wanted[entry.name]);
  }
  const set = merge(values, wanted, schema);
  if (!lent?.names) return set;
  const { values: before, names } = lent;
  lent = null;
  // The number beside an "auto" is no setting, but was there.
  return set.map((value, i) => (names.includes(schema[i].name) ? before[i] : value));
}

/** Puts a link with all settings into the address bar and, where the browser lets us, on the clipboard. */
export function link(values, schema) {
  const address = permalink(location.href, { ...read(values, schema), ...named(window.specviz.whatif.values()) });
  history.replaceState(history.state, "", address);
  navigator.clipboard?.writeText(address).catch(() => {});
}

/** The controls' values with the settings of the page's own address. Nothing is run. */
export function opened(values, schema) {
  const asked = askedIn(location.href);
  if (Object.keys(asked).length) window.specviz.whatif.set(asked);
  return merge(values, fromAddress(location.href, schema), schema);
}
