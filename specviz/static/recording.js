// Recorded runs: read from a file that somebody chose, unpacked, and checked before anything is drawn of it.

import { Metrics } from "./reducer.js";
import { Scene } from "./scene.js";

/** The version of the events that this page reads. */
const SCHEMA = 1;
/** A recording of an hour has some 100 MB; a file that unpacks to more is none, or meant to fill the memory. */
const LARGEST = 256 * 2 ** 20;

/** The text of a file, unpacked when it is gzipped. Throws a sentence for people. */
export async function readText(file) {
  const first = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  const packed = first[0] === 0x1f && first[1] === 0x8b;
  const stream = packed ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
  const decoder = new TextDecoder("utf-8", { fatal: true });
  const parts = [];
  let size = 0;
  try {
    for (const reader = stream.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      size += value.length;
      if (size > LARGEST) {
        await reader.cancel();
        throw new RangeError();
      }
      parts.push(decoder.decode(value, { stream: true }));
    }
    return parts.join("") + decoder.decode();
  } catch (error) {
    if (error instanceof RangeError) throw new Error(`${file.name} is larger than ${LARGEST / 2 ** 20} MiB: no recording is`);
    throw new Error(`${file.name} cannot be read: it is ${packed ? "cut off or damaged" : "no text"}`);
  }
}

/** A recording's lines as events. Throws an error that names the first line that is wrong. */
export function readEvents(text, name = "the recording") {
  const events = [];
  text.split("\n").forEach((line, i) => {
    if (!line.trim()) return;
    const where = `${name}, line ${i + 1}`;
    let event;
    try {
      event = JSON.parse(line);
    } catch {
      throw new Error(`${where} is not JSON: is the file cut off?`);
    }
    check(event, events.at(-1)?.seq ?? 0, where);
    events.push(event);
  });
  if (!events.some((event) => event.kind === "run_start")) throw new Error(`${name} holds no run_start: it is no recording of a run`);
  rehearse(events, name);
  return events;
}

function check(event, previous, where) {
  if (event === null || typeof event !== "object" || typeof event.kind !== "string") throw new Error(`${where} is no event`);
  if (!Number.isInteger(event.seq) || event.seq <= previous) throw new Error(`${where}: sequence numbers must rise`);
  if (!Number.isFinite(event.t)) throw new Error(`${where}: ${event.kind} has no time`);
  if (event.kind === "run_start" && event.schema !== SCHEMA) {
    throw new Error(`${where}: recorded with schema version ${event.schema}, this page reads ${SCHEMA}`);
  }
}

/** Reduce the whole run once, out of sight: what lacks a field is found now, and not in the middle of a picture. */
function rehearse(events, name) {
  const metrics = new Metrics();
  const scene = new Scene();
  for (const event of events) {
    try {
      metrics.add(event);
      scene.add(event);
    } catch {
      throw new Error(`${name}, event ${event.seq}: this ${event.kind} is not as this version tells it`);
    }
  }
  metrics.toJSON();
}
