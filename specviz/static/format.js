// Numbers as a person reads them. A dash stands for "not known yet".

export const DASH = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** `toLocaleString` would make a new one at each call, which is most of its cost. */
const FORMATS = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));

/** Three significant digits at most, without exponents: 0.42, 4.2, 42, 1,234. */
export function number(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return FORMATS[digits].format(value);
}

export const integer = (value) => (known(value) ? FORMATS[0].format(Math.round(value)) : DASH);

export const percent = (share) => (known(share) ? `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %` : DASH);

/** Sentences of the engine write 20%, the page 20 %. */
export const spaced = (text) => text.replace(/(\d)%/g, "$1 %");

export const probability = (value) => (known(value) ? value.toFixed(value < 0.01 && value > 0 ? 4 : 3) : DASH);

/** Nanoseconds in the unit that suits them. */
export function duration(ns) {
  if (!known(ns)) return DASH;
  const size = Math.abs(ns);
  if (size >= 1e9) return `${number(ns / 1e9)} s`;
  if (size >= 1e6) return `${number(ns / 1e6)} ms`;
  return `${number(ns / 1e3)} µs`;
}

/** A time on an axis with ticks every `step` up to `end`, in ns: one unit, and as many decimals as tell ticks apart. */
export function instant(t, step, end) {
  const [unit, size] = end >= 1e9 ? ["s", 1e9] : end >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
  const decimals = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  return `${(t / size).toFixed(decimals)} ${unit}`;
}

export function bytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${number(value)} ${units[unit]}`;
}

/** Seconds as a running clock: 4.2 s, 1:05. */
export function clock(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}

/** A knob's value, whatever its type. */
export const value = (item) => (typeof item === "number" ? String(Number(item.toPrecision(6))) : String(item));

export const plural = (count, noun) => `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;
