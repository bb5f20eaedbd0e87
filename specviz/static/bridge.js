/**
 * Carries what Gradio's own events bring to the panels: which run to attach to, batches while the
 * websocket is closed, and the buttons below the controls.
 */

const base = new URL("../", import.meta.url);
let current = null; // {run, token} of this page's last run
let next = 1; // the first sequence number that the generator has not brought yet
let filling = Promise.resolve();

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
  if (message.op === "attach") {
    current = { run: message.run, token: message.token };
    next = 1;
    window.specviz?.attach(current);
  } else if (message.op === "feed") {
    const run = current;
    filling = filling.then(() => feed(run, message.batch));
  } else if (message.op === "end") {
    const run = current;
    filling = filling.then(() => fill(run, message.last));
  }
}

/** Saves the current run, or the recording while there is no run yet. */
function download(name) {
  const link = document.createElement("a");
  if (current) {
    link.href = exportUrl(current, name);
  } else {
    link.href = new URL("recording.ndjson", base).href;
    name = "recording.ndjson";
  }
  link.download = name;
  link.click();
}

window.specvizBridge = { receive, download, clicked: () => window.specviz?.clicked?.() };
