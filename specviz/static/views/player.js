// The controls of a recording: play, pause, speed, and where it stands.

import { button, el, setText } from "../dom.js";
import { clock } from "../format.js";

const SPEEDS = [0.1, 0.25, 1, 4];

/** Controls for whatever `player()` returns; hidden while that is null. */
export function createPlayer({ player, wake }) {
  const play = button("Pause", "Pause or play the recording", () => {
    const replay = player();
    if (replay.playing && !replay.finished) replay.pause();
    else replay.play();
    wake();
  });
  const speed = el("select", {
    class: "sv-select", "aria-label": "Speed of the recording",
    on: { change: () => (player().speed = Number(speed.value)) },
  }, ...SPEEDS.map((rate) => el("option", { value: rate, text: `${rate}×`, selected: rate === 1 })));
  const slider = el("input", {
    class: "sv-range", type: "range", min: 0, max: 1000, value: 0, "aria-label": "Position in the recording",
    on: {
      input: () => {
        const replay = player();
        replay.seek((slider.value / 1000) * replay.end);
        wake();
      },
    },
  });
  const time = el("span", { class: "sv-player-time" });
  const hint = el("span", { class: "sv-player-hint", text: "A recorded run: press Generate for your own." });
  const root = el("div", { class: "sv-player" }, play, slider, time, speed, hint);
  root.hidden = true;

  function draw() {
    const replay = player();
    root.hidden = !replay;
    if (!replay) return;
    setText(play, replay.playing && !replay.finished ? "Pause" : "Play");
    speed.value = String(replay.speed);
    if (document.activeElement !== slider || replay.playing) slider.value = String(Math.min(1000, (replay.t / replay.end) * 1000));
    slider.setAttribute("aria-valuetext", clock(replay.t / 1e9));
    setText(time, `${clock(Math.min(replay.t, replay.end) / 1e9)} of ${clock(replay.end / 1e9)}`);
  }

  return { root, draw };
}
