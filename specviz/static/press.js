// A page has one run at a time, and no click on a button that starts one is lost. Gradio itself would ignore a click
// that comes before the event of the run before is over, which takes a moment after a stop.

const STARTERS = "#sv-generate, #sv-baseline, #sv-compare-go";
const OVER = ["finished", "stopped", "failed"];
/** Gradio closes its event a little after the end's message, in ms. */
const CLOSING = 300;
/** How long an end that is sure to come is waited for, in ms: its message may be lost. */
const PATIENCE = 5000;
const STILL_ON = "Your run is still on: press Stop first, or wait for its end.";
const ENDING = "The run before is about to end; yours starts then.";

export class Presses {
  #run = null; // whose event is not over
  #ended = -Infinity;
  #stopped = null;
  #waiting = null;

  /** `status()`: the shown run's; `tell(words)`: says why nothing happens, null takes it back. */
  constructor({ status, tell, now = () => performance.now() }) {
    Object.assign(this, { status, tell, now });
  }

  /** An event of Gradio's stands by `run` from now on; a comparison has two, one after the other. */
  began(run) {
    this.#run = run;
  }

  ended(run) {
    if (run !== this.#run) return;
    this.#run = null;
    this.#ended = this.now();
    if (!this.#waiting) this.tell(null);
  }

  stopped() {
    this.#stopped = this.#run;
  }

  /** A click on `button`: true when it may go on to Gradio now; otherwise it is made again later, or refused in words. */
  clicked(button) {
    if (this.#waiting) return button === this.#waiting.button && this.#waiting.passing;
    if (this.#free()) return true;
    const ending = !this.#run || this.#run === this.#stopped || OVER.includes(this.status());
    this.tell(ending ? ENDING : STILL_ON);
    if (ending) this.#wait(button);
    return false;
  }

  #free = () => !this.#run && this.now() - this.#ended >= CLOSING;

  #wait(button) {
    const waiting = (this.#waiting = { button, passing: false });
    const until = this.now() + PATIENCE;
    const look = () => {
      if (!this.#free() && this.now() < until) return void setTimeout(look, 50);
      this.#run = null;
      waiting.passing = true;
      this.tell(null);
      button.click();
      this.#waiting = null;
    };
    setTimeout(look, 50);
  }

  /** Listen before Gradio does. */
  watch(page = document) {
    page.addEventListener("click", (event) => {
      if (event.target.closest?.("#sv-stop")) this.stopped();
      const button = event.target.closest?.(STARTERS);
      if (!button || this.clicked(button)) return;
      event.preventDefault();
      event.stopImmediatePropagation();
    }, true);
  }
}
