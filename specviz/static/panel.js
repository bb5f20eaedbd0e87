// The frame that all panels share: a title put as a question, one live sentence, the picture, and its table.

import { button, el, setText } from "./dom.js";

const TABLE_ROWS = 200;
/** How often an open table is rebuilt, in ms: faster could not be read. */
const TABLE_EVERY = 500;

/**
 * A panel. `table()` gives {head: [...], rows: [[...]]} when the table is open, and may give `choose(row)`,
 * which the first cell of each row then offers as a button.
 * Returns {root, body, actions, say(sentence), refreshTable(now)}.
 */
export function createPanel({ id, title, question, table }) {
  const heading = el("h3", { class: "sv-title", id: `sv-${id}-title` }, el("span", { text: title }));
  heading.append(el("span", { class: "sv-question", text: question }));
  const sentence = el("p", { class: "sv-sentence", id: `sv-${id}-sentence` });
  const actions = el("div", { class: "sv-actions" });
  const body = el("div", { class: "sv-body" });
  const holder = el("div", { class: "sv-table", tabindex: "0", role: "region", "aria-label": `${title}: the numbers` });
  holder.hidden = true;
  let drawn = -Infinity;
  let shown = null;

  const toggle = button("Table", `The numbers of “${title}” as a table`, () => {
    holder.hidden = !holder.hidden;
    toggle.setAttribute("aria-pressed", String(!holder.hidden));
    drawn = -Infinity;
    refreshTable(performance.now());
  }, false);
  toggle.setAttribute("aria-controls", (holder.id = `sv-${id}-table`));

  function refreshTable(now) {
    if (holder.hidden || now - drawn < TABLE_EVERY) return;
    drawn = now;
    const content = table();
    const next = JSON.stringify(content.rows);
    if (next === shown) return;
    shown = next;
    // Whoever stands on a button of the table keeps standing there.
    const at = [...holder.querySelectorAll("button")].indexOf(document.activeElement);
    holder.replaceChildren(createTable(content, title));
    if (at >= 0) holder.querySelectorAll("button")[at]?.focus({ preventScroll: true });
  }

  const root = el(
    "section",
    { class: `sv-panel sv-panel-${id}`, "aria-labelledby": heading.id, data: { panel: id } },
    el("header", { class: "sv-panel-head" }, heading, actions),
    sentence,
    body,
    holder,
  );
  // Panels add their own buttons before this one.
  actions.append(toggle);
  return { root, body, actions, toggle, say: (text) => setText(sentence, text), refreshTable };
}

/** A table of texts with a caption; only the last rows of a long one. */
export function createTable({ head, rows, choose }, title) {
  const shown = rows.slice(-TABLE_ROWS);
  const caption = rows.length > shown.length ? `${title}: the last ${TABLE_ROWS} of ${rows.length} rows` : title;
  return el(
    "table",
    {},
    el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...shown.map((row) => el("tr", {}, ...row.map((cell, i) => createCell(String(cell ?? "–"), i === 0 && choose && (() => choose(row))))))),
  );
}

/** Lengths of texts that stay on one line ("38.2 ms"), and of those that need a wide column. */
const [SHORT, LONG] = [14, 40];

function createCell(text, action) {
  if (action) return el("td", {}, button(text, "Show it in all panels", action));
  return el("td", { class: text.length <= SHORT ? "sv-short" : text.length > LONG ? "sv-long" : "", text });
}
