// The settings of the what-if panel: a machine, a model, and what is asked of them.

import { button, el, setText } from "../dom.js";
import { number } from "../format.js";

/** id, label, unit or hint; ranges get a slider, the others a number field. */
const FIELDS = [
  ["batch", "Batch", "sequences", "number", 1],
  ["k", "Draft length k", "tokens", "range", 1],
  ["acceptance", "Acceptance", "of draft tokens", "range", 0.01],
  ["fast_gib", "Fast memory", "GiB", "number"],
  ["host_gib", "Host memory", "GiB", "number"],
];

/** `changed()` is called at each change; `values()` is the query for the server. */
export function createWhatIfSettings(changed) {
  const lists = { hardware: [], model: [] };
  const selects = Object.fromEntries([["hardware", "Machine"], ["model", "Model"]].map(([id, label]) =>
    [id, { label, node: el("select", { class: "sv-select", id: `sv-whatif-${id}`, on: { change: () => (fitMemory(), changed()) } }) }]));
  const inputs = {};
  const outputs = {};
  const complaint = el("p", { class: "sv-notice", role: "alert" });
  complaint.hidden = true;
  let waiting = {};
  let begun = {};
  let most = false;

  const largest = button("Largest", "As many sequences as host memory holds", () => {
    most = !most;
    largest.setAttribute("aria-pressed", String(most));
    inputs.batch.disabled = most;
    changed();
  }, false);

  const fields = FIELDS.map(([id, label, unit, type, step]) => {
    inputs[id] = el("input", {
      id: `sv-whatif-${id}`, type, step: step ?? "any", class: type === "range" ? "sv-range" : "sv-number",
      on: { input: () => (tell(id), changed()) },
    });
    outputs[id] = el("span", { class: "sv-hint", text: unit });
    return el("div", { class: "sv-field" }, el("label", { for: `sv-whatif-${id}`, text: label }),
      el("div", { class: "sv-field-line" }, inputs[id], outputs[id], id === "batch" ? largest : null));
  });
  const root = el("div", { class: "sv-whatif-settings" },
    ...Object.entries(selects).map(([id, { label, node }]) =>
      el("div", { class: "sv-field" }, el("label", { for: `sv-whatif-${id}`, text: label }), node)),
    ...fields, complaint);

  function tell(id) {
    const [, , unit, type] = FIELDS.find(([name]) => name === id);
    if (type !== "range") return;
    const words = `${number(Number(inputs[id].value))} ${unit}`;
    setText(outputs[id], words);
    inputs[id].setAttribute("aria-valuetext", words);
  }

  /** The chosen machine's own memories stand in the empty fields. */
  function fitMemory() {
    const machine = lists.hardware.find(({ name }) => name === selects.hardware.node.value);
    for (const id of ["fast_gib", "host_gib"]) {
      inputs[id].value = "";
      inputs[id].placeholder = machine?.[id] ? String(machine[id]) : "none";
      inputs[id].disabled = !machine?.[id];
    }
  }

  function fill({ hardware, models, limits, defaults }) {
    Object.assign(lists, { hardware, model: models });
    for (const [id, { node }] of Object.entries(selects)) {
      node.replaceChildren(...lists[id].map(({ name, label }) => el("option", { value: name, text: label })));
      node.value = defaults[id];
    }
    for (const [id, { min, max, default: start }] of Object.entries(limits)) {
      if (!inputs[id]) continue;
      Object.assign(inputs[id], { min, max });
      if (!id.endsWith("_gib")) inputs[id].value = start;
      tell(id);
    }
    fitMemory();
    begun = values();
    set(waiting);
  }

  function set(values) {
    waiting = values; // until the lists are there
    if (!lists.hardware.length) return;
    for (const [id, { node }] of Object.entries(selects)) {
      if (lists[id].some(({ name }) => name === values[id])) node.value = values[id];
    }
    if (values.hardware) fitMemory();
    if (values.batch !== undefined && (values.batch === "max") !== most) largest.click();
    for (const id of Object.keys(inputs)) {
      if (values[id] === undefined || values[id] === "max") continue;
      inputs[id].value = values[id];
      tell(id);
    }
  }

  /** As `set`, with the panel's own settings where `values` has none. */
  const restore = (values) => set({ ...begun, ...values });

  /** What is wrong with a field, or "". */
  function fault() {
    const wrong = FIELDS.find(([id]) => !inputs[id].disabled && !inputs[id].checkValidity());
    if (!wrong) return "";
    const { min, max } = inputs[wrong[0]];
    return `${wrong[1]} is out of range: use ${min} to ${max}`;
  }

  function values() {
    if (!lists.hardware.length) return waiting;
    const fields = Object.fromEntries(Object.entries(inputs).map(([id, node]) => [id, node.disabled ? "" : node.value]));
    const machine = { hardware: selects.hardware.node.value, model: selects.model.node.value };
    return { ...machine, ...fields, ...(most ? { batch: "max" } : {}) };
  }

  function complain(text) {
    setText(complaint, text);
    complaint.hidden = !text;
  }

  return { root, fill, set, restore, fault, values, complain };
}
