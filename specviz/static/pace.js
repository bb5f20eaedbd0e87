// How fast the model loads. What is shown is the rate of the last seconds: what a checked or resumed part did says
// nothing of the rest.

const WINDOW_MS = 5000;
const LEAST_MS = 500;

/** `pace(load, now)`, now in ms: bytes a second of the stage that runs, null while unknown. */
export function createPace() {
  let stage = null;
  let marks = [];
  return (load, now) => {
    if (!load) return null;
    if (load.stage !== stage || load.done_bytes < marks.at(-1).done) {
      stage = load.stage;
      marks = [];
    }
    marks.push({ now, done: load.done_bytes });
    while (marks.length > 2 && marks[1].now <= now - WINDOW_MS) marks.shift();
    const [first] = marks;
    return now - first.now < LEAST_MS ? null : ((load.done_bytes - first.done) / (now - first.now)) * 1000;
  };
}
