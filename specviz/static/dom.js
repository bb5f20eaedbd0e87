// Building the page: elements with text, never with markup. Model text is hostile, so no innerHTML anywhere.

/** An element: `properties` are attributes, except text, class, on (listeners) and data. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else if (name === "on") for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set text only when it changed: writing the same text again would still cost layout and selections. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button that does something, or, with `pressed` given, one that is on or off. */
export function button(text, title, onClick, pressed) {
  const node = el("button", { type: "button", class: "sv-button", text, title, on: { click: onClick } });
  if (pressed !== undefined) node.setAttribute("aria-pressed", String(pressed));
  return node;
}

/** What colours mean: [class of the swatch, words] pairs. */
export const legend = (items) =>
  el("div", { class: "sv-legend sv-legend-small" }, ...items.map(([name, label]) =>
    el("span", { class: "sv-key" }, el("i", { class: `sv-swatch ${name}` }), label),
  ));

/** A canvas that is as sharp as the screen and tells `onResize(width, height)` in CSS pixels. */
export function canvas(properties, height, onResize) {
  const node = el("canvas", properties);
  const context = node.getContext("2d");
  const box = el("div", { class: "sv-canvas" }, node);
  const state = { node, context, box, width: 0, height };
  const fit = () => {
    const width = Math.floor(box.clientWidth);
    // A hidden tab has no width: keep the old picture until it comes back.
    if (width <= 0) return;
    const scale = window.devicePixelRatio || 1;
    state.width = width;
    node.width = Math.round(width * scale);
    node.height = Math.round(state.height * scale);
    node.style.width = `${width}px`;
    node.style.height = `${state.height}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    onResize(width, state.height);
  };
  state.setHeight = (value) => {
    if (value === state.height) return;
    state.height = value;
    fit();
  };
  new ResizeObserver(fit).observe(box);
  return state;
}

/** A small box that follows the pointer; `show(x, y, lines)` places it inside `parent`. */
export function tooltip(parent) {
  const node = el("div", { class: "sv-tip", role: "presentation" });
  node.hidden = true;
  parent.append(node);
  return {
    show(x, y, lines) {
      node.replaceChildren(...lines.map((line, i) => el("div", { text: line, class: i ? "sv-tip-line" : "sv-tip-head" })));
      node.hidden = false;
      const room = parent.clientWidth - node.offsetWidth - 4;
      node.style.left = `${Math.max(4, Math.min(x + 14, room))}px`;
      node.style.top = `${Math.max(4, y - node.offsetHeight - 10)}px`;
    },
    hide() {
      node.hidden = true;
    },
  };
}
