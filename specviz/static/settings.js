// Settings of the controls as one object: from a preset, the tour or a link into Gradio's values, and back.
// Nothing here ever starts a run.

/** Whether `value` may stand in the component that `entry` (of presets.py's schema) describes. */
function fits(entry, value) {
  if (entry.kind === "text") return typeof value === "string" && value.length <= entry.most;
  if (entry.kind === "bool") return typeof value === "boolean";
  if (entry.kind === "choice") return entry.choices.includes(value);
  return typeof value === "number" && value >= entry.min && value <= entry.max && (!entry.whole || Number.isInteger(value));
}

/** `values` (one a component) with what `settings` sets; what does not fit is left as it is. */
export function merge(values, settings, schema) {
  return values.map((value, i) => {
    const entry = schema[i];
    if (!Object.hasOwn(settings, entry.name)) return value;
    const wanted = settings[entry.name];
    if (entry.kind === "auto") return wanted === "auto" || (typeof wanted === "number" ? false : value);
    const most = entry.kind === "number" && typeof wanted === "number" ? Math.min(wanted, entry.max) : wanted;
    return fits(entry, most) ? most : value;
  });
}

/** The settings that stand in the components. */
export function read(values, schema) {
  const found = {};
  schema.forEach((entry, i) => {
    if (entry.kind === "auto") found[entry.name] = values[i] ? "auto" : null;
    else if (found[entry.name] !== "auto") found[entry.name] = values[i];
  });
  return found;
}

/** The settings with which a run goes on, from its events so far; null before it has begun. */
export function settingsOf(events) {
  const start = events.find(({ kind }) => kind === "run_start");
  if (!start) return null;
  const { config, link, prompts = [] } = start;
  const settings = { ...config, sequences: Math.max(prompts.length, 1), link: link.preset ? `emulated:${link.preset}` : link.kind };
  // What a chat's template made of a prompt is not what was typed.
  if (!config.chat && prompts.length) settings.prompt = prompts[0].map(({ text }) => text).join("").trimStart();
  for (const knob of events) if (knob.kind === "knob") settings[knob.name] = knob.new;
  return settings;
}

const PREFIX = "sv.";
const WHAT_IF = "whatif.";

/** The page's address with all settings in its query; other parameters stay. */
export function permalink(address, settings) {
  const url = new URL(address);
  for (const name of [...url.searchParams.keys()]) if (name.startsWith(PREFIX)) url.searchParams.delete(name);
  for (const [name, value] of Object.entries(settings)) {
    if (value !== null && value !== undefined) url.searchParams.set(PREFIX + name, String(value));
  }
  return url.href;
}

/** The settings in an address; texts become what the schema says. Unknown names are left out. */
export function fromAddress(address, schema) {
  const given = new URL(address).searchParams;
  const settings = {};
  for (const entry of schema) {
    const text = given.get(PREFIX + entry.name);
    if (text === null) continue;
    if (text === "auto" && schema.some((other) => other.name === entry.name && other.kind === "auto")) settings[entry.name] = "auto";
    else if (entry.kind === "number" && text !== "") settings[entry.name] = Number(text);
    else if (entry.kind === "bool") settings[entry.name] = text === "true";
    else if (entry.kind === "text" || entry.kind === "choice") settings[entry.name] = text;
  }
  return settings;
}

/** Settings of the what-if panel under the names that they have in an address. */
export const named = (asked) => Object.fromEntries(
  Object.entries(asked).filter(([, value]) => value !== "").map(([name, value]) => [WHAT_IF + name, value]));

/** What an address asks of the what-if panel; the panel itself leaves out what it does not know. */
export function askedIn(address) {
  const prefix = PREFIX + WHAT_IF;
  return Object.fromEntries([...new URL(address).searchParams].filter(([name]) => name.startsWith(prefix)).map(([name, value]) => [name.slice(prefix.length), value]));
}
