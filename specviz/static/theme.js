// Colours live in the style sheet as custom properties; canvases and plots read them from there.

const NAMES = [
  "panel", "ink", "muted", "line", "faint",
  "draft", "attention", "experts", "demand", "prefetch", "stall", "knob", "focus",
  "accepted", "corrected", "bonus", "rejected", "plain",
  "hit", "late", "miss", "heat",
];

/** The present colours by name, read from `node`. */
export function colours(node) {
  const style = getComputedStyle(node);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--sv-${name}`).trim()]));
}

const listeners = new Set();

/** Call `listener` when colours may have changed. */
export const onThemeChange = (listener) => listeners.add(listener);

/** Tell all listeners, e.g. because the style sheet has arrived. */
export const themeChanged = () => listeners.forEach((listener) => listener());

/** Watch for the page turning dark or light: Gradio toggles a class of body. */
export function watchTheme() {
  const observer = new MutationObserver(themeChanged);
  for (const node of [document.documentElement, document.body]) {
    observer.observe(node, { attributes: true, attributeFilter: ["class", "data-theme"] });
  }
}

let motion = null;

export const reducedMotion = () => (motion ??= window.matchMedia("(prefers-reduced-motion: reduce)")).matches;
