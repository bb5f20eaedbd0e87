/**
 * Carries what Gradio's own events bring to the panels: which run to attach to, batches while the
 * websocket is closed, and the buttons below the controls.
 */

import * as controls from "./controls.js";
import { Presses } from "./press.js";
import { settingsOf } from "./settings.js";
import { reducedMotion } from "./theme.js";

const base = new URL("../", import.meta.url);
let current = null; // {run, token} of this page's last run
let opened = null; // the text of a recording that somebody opened
let next = 1; // the first sequence number that the generator has not brought yet
let filling = Promise.resolve();
const kept = {}; // {key, room} of this page, {run, token} of its last run
const presses = new Presses({
  status: () => window.specviz?.state?.metrics.run.status,
  tell: (words) => window.specviz?.tell(words),
});
const watching = new URLSearchParams(window.location.search).get("watch");

/** Passes a batch on, after what is missing before it. */
async function feed(run, batch) {
  if (!run || run !== current || batch.run !== run.run) return;
  await fill(run, batch.from - 1);
  if (run !== current) return;
  next = Math.max(next, batch.to + 1);
  window.specviz?.feed(batch);
}

/**
 * Fetches what the panels lack up to number `last`: Gradio drops all but the newest of the values that come
 * while a tab is hidden, and a websocket may close with frames under way.
 */
async function fill(run, last) {
  const wanted = Math.max(next, (window.specviz?.state?.seq ?? 0) + 1);
  if (!run || run !== current || wanted > last) return;
  const events = await fetchEvents(run, wanted);
  if (run !== current || !events.length) return;
  const to = events[events.length - 1].seq;
  next = Math.max(next, to + 1);
  window.specviz?.feed({ v: 1, run: run.run, from: wanted, to, events, lost: 0 });
}

async function fetchEvents(run, from) {
  try {
    const response = await fetch(`${exportUrl(run, "events.ndjson")}?from=${from}`);
    const text = response.ok ? await response.text() : "";
    return text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  } catch {
    return []; // the reducer counts the gap as lost
  }
}

function exportUrl(run, name) {
  return new URL(`export/${run.run}/${run.token}/${name}`, base).href;
}

function receive(text) {
  let message;
  try {
    message = JSON.parse(text);
  } catch {
    return; // the empty value with which the page starts
  }
  if (message.key) remember({ key: message.key, room: message.room });
  if (watching) return; // those who watch have no run of their own
  if (message.op === "end") presses.ended(message.run);
  if (message.op === "attach") {
    current = { run: message.run, token: message.token };
    next = 1;
    presses.began(message.run);
    remember(current);
    window.specviz?.attach({ ...current, rejoined: Boolean(message.key), compare: message.compare });
    if (message.key) showSettings(current);
    if (message.key) recall(message.compare?.before ?? []);
  } else if (message.op === "feed") {
    const run = current;
    filling = filling.then(() => feed(run, message.batch));
  } else if (message.op === "end" && message.run === current?.run) {
    const run = current;
    filling = filling.then(() => fill(run, message.last));
  }
}

/** After a reload the controls stand where the run has them, not where a new page does. */
async function showSettings(run) {
  for (let i = 0; i < 60 && run === current; i++) {
    const settings = settingsOf(await fetchEvents(run, 1));
    if (settings && run === current) return controls.show(settings);
    await new Promise((resolve) => setTimeout(resolve, 500)); // it loads, or waits in the line
  }
}

/** After a reload in the middle of a comparison: the sides that are over. */
async function recall(before) {
  for (const side of before) window.specviz?.compared(side, await fetchEvents(side, 1));
}

/** Kept for this tab alone: after a reload, it goes on with its run, and its watch link stays the same. */
function remember(values) {
  Object.assign(kept, values);
  try {
    sessionStorage.setItem("specviz", JSON.stringify(kept));
  } catch {
    // A browser that keeps nothing: a reload begins anew.
  }
}

/** Shows the link with which others watch this page's runs, and copies it where the browser allows that. */
async function share() {
  if (!kept.room) return window.specviz?.tell("The link is not there yet, since the page is still loading: try again in a moment.");
  const link = new URL(window.location.href);
  link.search = new URLSearchParams({ watch: kept.room });
  link.hash = "";
  let copied = "";
  try {
    await navigator.clipboard.writeText(link.href);
    copied = " (copied)";
  } catch {
    // Only over https, and only with leave.
  }
  window.specviz?.tell(`Whoever opens this link sees your runs and can change nothing${copied}: ${link.href}`);
}

/** Saves the current run (those who watch: the one they see), or the recording while there is no run yet. */
function download(name) {
  const run = watching && window.specviz?.state?.run ? { run: window.specviz.state.run, token: watching } : current;
  if (run) return save(name, exportUrl(run, name));
  if (opened) return saveBlob("recording.ndjson", new Blob([opened], { type: "application/x-ndjson" }));
  return save("recording.ndjson", new URL("recording.ndjson", base).href);
}

function save(name, href) {
  const link = document.createElement("a");
  link.href = href;
  link.download = name;
  link.click();
}

function saveBlob(name, blob) {
  const url = URL.createObjectURL(blob);
  save(name, url);
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Saves all figures as one picture. */
async function picture(format) {
  const blob = await window.specviz?.picture(format);
  if (blob) saveBlob(`specviz-figures.${format}`, blob);
}

/** Asks for an exported run and plays it; it never leaves the browser. */
function open() {
  const input = document.createElement("input");
  input.type = "file";
  input.accept = ".ndjson,.gz";
  input.onchange = async () => {
    try {
      opened = await window.specviz.open(input.files[0]);
      current = null;
    } catch {
      // The page says why.
    }
  };
  input.click();
}

if (watching) {
  document.documentElement.classList.add("sv-watching"); // controls.css hides what a watcher cannot use
  window.specviz?.watch(watching);
}

/** On a phone the panels are below the controls: whoever starts a run wants to see it, but for a tour's own panel. */
function showPanels() {
  if (!window.matchMedia("(max-width: 899px)").matches || document.querySelector(".sv-tour:not([hidden])")) return;
  document.querySelector(".sv-header")?.scrollIntoView({ behavior: reducedMotion() ? "auto" : "smooth" });
}

/** The page's key comes with its first answer: a run that started without it could not be watched. */
async function clicked(values, first) {
  const filled = controls.clicked(values, first);
  showPanels();
  for (let i = 0; i < 60 && !kept.room; i++) await new Promise((resolve) => setTimeout(resolve, 50));
  return filled;
}

presses.watch();
window.specvizBridge = { receive, download, picture, open, share, ...controls, clicked };
