// Plays a recorded run at its own pace, with pause, speed and a way to jump.

/** How long a finished recording rests before it starts again, in ms. */
const REST = 8000;

/** A player over `events`. `handlers`: events(list), restart() to forget everything before a jump back. */
export class Replay {
  playing = false;
  speed = 1;
  t = 0;
  #next = 0;
  #last = null;
  #rested = 0;

  constructor(events, handlers, { loop = true } = {}) {
    this.events = events;
    this.handlers = handlers;
    this.loop = loop;
    this.end = events.reduce((latest, event) => Math.max(latest, event.t), 0);
  }

  get finished() {
    return this.#next >= this.events.length;
  }

  play() {
    if (this.finished) this.seek(0);
    this.playing = true;
    this.#last = null;
  }

  pause() {
    this.playing = false;
  }

  /** Jump to `t` ns; back means from the start again, which takes a few ms for a whole run. */
  seek(t) {
    if (t < this.t || this.finished) {
      this.#next = 0;
      this.handlers.restart();
    }
    this.t = t;
    this.#rested = 0;
    this.#deliver();
  }

  /** Advance to the wall clock `now` (ms). */
  tick(now) {
    const passed = this.#last === null ? 0 : Math.min(now - this.#last, 250);
    this.#last = now;
    if (!this.playing) return;
    if (this.finished) {
      this.#rested += passed;
      if (this.loop && this.#rested > REST) this.seek(0);
      return;
    }
    this.t += passed * 1e6 * this.speed;
    this.#deliver();
  }

  #deliver() {
    const first = this.#next;
    // Events are in the order of their emission; one that is stamped later waits, and all behind it.
    while (this.#next < this.events.length && this.events[this.#next].t <= this.t) this.#next++;
    if (this.#next > first) this.handlers.events(this.events.slice(first, this.#next));
  }
}
