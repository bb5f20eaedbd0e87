"""The browser's plumbing, run in node: what the transport delivers, what a replay plays, what the scene keeps."""

from __future__ import annotations

import json

import pytest
from node import GOLDEN, STATIC, javascript, needs_node

pytestmark = needs_node

# A clock and a websocket that the test moves by hand.
WORLD = """
let now = 0;
let timers = [];
globalThis.setTimeout = (action, ms) => { const timer = { at: now + ms, action }; timers.push(timer); return timer; };
globalThis.clearTimeout = (timer) => { timers = timers.filter((other) => other !== timer); };
const pass = (ms) => {
  const until = now + ms;
  for (;;) {
    const due = timers.filter((timer) => timer.at <= until).sort((a, b) => a.at - b.at)[0];
    if (!due) break;
    now = due.at;
    timers = timers.filter((timer) => timer !== due);
    due.action();
  }
  now = until;
};
const sockets = [];
globalThis.WebSocket = class {
  sent = [];
  constructor(url) { this.url = String(url); sockets.push(this); }
  send(text) { this.sent.push(JSON.parse(text)); }
  close() {}
  open() { this.onopen(); }
  say(message) { this.onmessage({ data: JSON.stringify({ v: 1, ...message }) }); }
  drop(code = 1006) { this.onclose({ code }); }
};
const { Transport, socketUrl } = await import(`file://${process.argv[2]}/transport.js`);
const log = { modes: [], seqs: [], acks: [], errors: [] };
let seq = 0, over = false;
const start = () => new Transport({
  run: "r", token: "t", seq: () => seq, over: () => over, url: "ws://h/ws",
  handlers: {
    events: (events) => events.forEach((event) => { if (event.seq > seq) { seq = event.seq; log.seqs.push(seq); } }),
    mode: (mode) => log.modes.push(mode),
    ack: (m) => log.acks.push(m.version),
    error: (m) => log.errors.push(m.message),
  },
});
const batch = (from, to, lost = 0) => ({
  run: "r", from, to, lost, events: Array.from({ length: to - from + 1 }, (_, i) => ({ seq: from + i })),
});
"""


def run(script: str, world: str = WORLD) -> dict:
    return json.loads(javascript(world + script, STATIC, GOLDEN))


def test_live_socket_says_hello_and_resumes_where_it_was():
    out = run("""
    const transport = start();
    sockets[0].open();
    sockets[0].say({ op: "pong" });
    sockets[0].say(batch(1, 3));
    sockets[0].drop();
    pass(600);
    sockets[1].open();
    sockets[1].say(batch(4, 5));
    console.log(JSON.stringify({ log, hello: sockets.map((s) => s.sent[0]), sockets: sockets.length }));
    """)
    assert out["hello"][0] == {"op": "hello", "run": "r", "token": "t", "from": 1}
    assert out["hello"][1]["from"] == 4
    assert out["log"]["seqs"] == [1, 2, 3, 4, 5]
    assert out["log"]["modes"] == ["live", "reconnecting", "live"]


def test_generator_takes_over_after_three_seconds_with_what_came_before():
    out = run("""
    const transport = start();
    transport.feed(batch(1, 2));
    pass(2900);
    const early = [...log.seqs];
    pass(200);
    transport.feed(batch(3, 4));
    console.log(JSON.stringify({ log, early }));
    """)
    assert out["early"] == []
    assert out["log"]["modes"] == ["compat"]
    assert out["log"]["seqs"] == [1, 2, 3, 4]


def test_a_server_that_is_gone_is_not_called_compat_mode():
    out = run("""
    const transport = start();
    sockets[0].open();
    sockets[0].say({ op: "pong" });
    sockets[0].say(batch(1, 3));
    sockets[0].drop();
    pass(4000);
    const modes = [...log.modes];
    transport.feed(batch(4, 5));
    transport.feed(batch(6, 7));
    console.log(JSON.stringify({ log, modes }));
    """)
    assert out["modes"] == ["live", "reconnecting"]
    assert out["log"]["modes"] == ["live", "reconnecting", "compat"]
    assert out["log"]["seqs"] == [1, 2, 3, 4, 5, 6, 7]


def test_open_socket_makes_the_generator_redundant():
    out = run("""
    const transport = start();
    transport.feed(batch(1, 2));
    sockets[0].open();
    sockets[0].say({ op: "pong" });
    transport.feed(batch(1, 9));
    pass(10000);
    sockets[0].say(batch(1, 3));
    console.log(JSON.stringify({ log }));
    """)
    assert out["log"]["modes"] == ["live"]
    assert out["log"]["seqs"] == [1, 2, 3]


def test_a_hole_waits_unless_the_server_says_that_it_is_lost():
    out = run("""
    const transport = start();
    pass(3100);
    transport.feed(batch(5, 6));
    const hole = [...log.seqs];
    transport.feed(batch(5, 6, 4));
    transport.feed({ ...batch(7, 8), run: "another" });
    console.log(JSON.stringify({ log, hole }));
    """)
    assert out["hole"] == []
    assert out["log"]["seqs"] == [5, 6]


@pytest.mark.parametrize(("code", "over", "sockets"), [(1006, "false", 4), (1008, "false", 1), (1000, "true", 1)])
def test_reconnects_only_while_it_makes_sense(code, over, sockets):
    out = run(f"""
    start();
    sockets[0].open();
    sockets[0].say({{ op: "pong" }});
    over = {over};
    sockets[0].drop({code});
    for (let i = 1; i < 4; i++) {{ pass(9000); sockets[i]?.drop(1006); }}
    console.log(JSON.stringify({{ sockets: sockets.length }}));
    """)
    assert out["sockets"] == sockets


def test_commands_and_their_answers():
    out = run("""
    const transport = start();
    const early = transport.send({ op: "stop" });
    sockets[0].open();
    sockets[0].say({ op: "pong" });
    const sent = transport.send({ op: "set", name: "k", value: 3 });
    sockets[0].say({ op: "ack", name: "k", value: 3, version: 7 });
    sockets[0].say({ op: "error", message: "no" });
    transport.close();
    pass(60000);
    console.log(JSON.stringify({ log, early, sent, last: sockets[0].sent.at(-1), sockets: sockets.length }));
    """)
    assert (out["early"], out["sent"]) == (False, True)
    assert out["last"] == {"op": "set", "name": "k", "value": 3}
    assert (out["log"]["acks"], out["log"]["errors"]) == ([7], ["no"])
    assert out["sockets"] == 1


@pytest.mark.parametrize(
    ("script", "socket"),
    [
        ("http://host:7860/specviz/static/transport.js", "ws://host:7860/specviz/ws"),
        ("https://host/proxy/a/specviz/static/transport.js?v=3", "wss://host/proxy/a/specviz/ws"),
    ],
)
def test_socket_address_follows_the_scripts_own(script, socket):
    assert run(f'console.log(JSON.stringify({{ url: socketUrl("{script}").href }}));')["url"] == socket


REPLAY = """
import { readFileSync } from "node:fs";
const { Replay } = await import(`file://${process.argv[2]}/replay.js`);
const { readEvents: parse } = await import(`file://${process.argv[2]}/recording.js`);
const { Scene } = await import(`file://${process.argv[2]}/scene.js`);
const load = (name) => parse(readFileSync(`${process.argv[3]}/${name}.ndjson`, "utf-8"));
"""


def test_replay_plays_every_event_once_at_its_time():
    out = run(
        """
    const events = load("draft4");
    let heard = [], restarts = 0;
    const replay = new Replay(events, {
      events: (list) => heard.push(...list),
      restart: () => { heard = []; restarts++; },
    });
    replay.play();
    replay.tick(0);
    replay.tick(50);
    const early = heard.every((event) => event.t <= 50e6) && heard.length > 0 && heard.length < events.length;
    replay.seek(replay.end / 2);
    replay.seek(replay.end / 4);
    const back = heard.every((event) => event.t <= replay.end / 4);
    for (let now = 100; now < 2000; now += 50) replay.tick(now);
    const seqs = heard.map((event) => event.seq);
    for (let now = 2000; now < 12000; now += 200) replay.tick(now);
    console.log(JSON.stringify({ early, back, seqs, expected: events.map((event) => event.seq), restarts }));
    """,
        REPLAY,
    )
    assert out["early"]
    assert out["back"]
    assert out["seqs"] == out["expected"]
    assert out["restarts"] == 2  # the jump back, and once more from the start after its rest


def test_scene_keeps_text_slices_and_fates():
    out = run(
        """
    const scene = new Scene();
    for (const event of load("hand")) scene.add(event);
    console.log(JSON.stringify(scene));
    """,
        REPLAY,
    )
    assert "".join(token["text"] for token in out["sequences"][0]) == "Hi a b d"
    assert [token["text"] for draft in out["drafts"] for token in draft["tokens"]] == [" c"]
    assert [t["outcome"] for t in out["transfers"]] == ["used", "demand", "late", "cancelled", "wasted"]
    assert out["transfers"][0]["fated"] == 3500
    assert [s["lane"] for s in out["slices"]].count("experts") == 2
    assert len(out["rounds"]) == 2
    assert out["knobs"][0]["new"] == 0


def test_scene_is_bounded():
    out = run(
        """
    const { SLICE_LIMIT, TOKEN_LIMIT } = await import(`file://${process.argv[2]}/scene.js`);
    const scene = new Scene();
    const events = load("draft4");
    scene.add(events.find((event) => event.kind === "run_start"));
    const others = events.filter((event) => event.kind !== "run_start");
    for (let lap = 0; lap < 300; lap++) {
      for (const event of others) scene.add({ ...event, round: event.round + 100 * lap });
    }
    console.log(JSON.stringify({
      slices: scene.slices.length <= 2 * SLICE_LIMIT, tokens: scene.sequences[0].length === TOKEN_LIMIT,
      rest: scene.transfers.length + scene.rounds.length + scene.drafts.length,
    }));
    """,
        REPLAY,
    )
    assert out["slices"] and out["tokens"]
    assert out["rest"] < 12_001


def test_loading_tells_its_rate_and_the_time_left():
    """4 MiB/s for twenty seconds, behind a gigabyte that was there already."""
    out = run(
        """
    const { createPace } = await import(`file://${process.argv[2]}/pace.js`);
    const { phaseText } = await import(`file://${process.argv[2]}/views/header.js`);
    const MIB = 2 ** 20;
    const load = { stage: "packing experts", done_bytes: 0, total_bytes: 2000 * MIB };
    const pace = createPace();
    const first = pace(load, 0);
    let rate = null;
    for (let tick = 1; tick <= 200; tick++) rate = pace({ ...load, done_bytes: (1000 + tick * 0.4) * MIB }, tick * 100);
    const run = { status: "loading" };
    const text = phaseText({ run, load: { ...load, done_bytes: 1920 * MIB } }, rate);
    const other = pace({ ...load, stage: "quantizing" }, 20100);
    console.log(JSON.stringify({ first, rate: rate / MIB, text, other, plain: phaseText({ run, load }) }));
    """,
        world="globalThis.document = {};\n",
    )
    assert out["first"] is None and out["other"] is None
    assert out["rate"] == pytest.approx(4)
    assert out["text"] == "loading packing experts 96 % of 1.95 GiB · 4 MiB/s · 20.0 s left"
    assert out["plain"].startswith("loading packing experts 0") and "left" not in out["plain"]


def test_a_broken_recording_is_refused_with_its_line():
    out = run(
        """
    const lines = readFileSync(`${process.argv[3]}/hand.ndjson`, "utf-8").trim().split("\\n");
    const change = (line, values) => JSON.stringify({ ...JSON.parse(line), ...values });
    const without = (line, name) => change(line, { [name]: undefined });
    const round = lines.findIndex((line) => JSON.parse(line).kind === "round");
    const cases = {
      "line 4 is not JSON: is the file cut off?": [...lines.slice(0, 3), lines[3].slice(0, 40)],
      "version 99, this page reads 1": [change(lines[0], { schema: 99 }), ...lines.slice(1)],
      "line 2 is no event": [lines[0], "[]", ...lines.slice(1)],
      "line 3: sequence numbers must rise": [lines[0], lines[2], lines[1]],
      "has no time": [lines[0], change(lines[1], { t: "soon" })],
      "holds no run_start": lines.slice(1),
      "this round is not as this version tells it": lines.with(round, without(lines[round], "tokens")),
    };
    const complaint = (text) => { try { parse(text, "a.ndjson"); return ""; } catch (error) { return error.message; } };
    const wrong = Object.keys(cases).filter((message) => !complaint(cases[message].join("\\n")).includes(message));
    const empty = complaint("");
    const newer = [...lines.slice(0, 2), JSON.stringify({ seq: 3, kind: "mood", t: 0 })];
    const [more, whole] = [newer, lines].map((list) => parse(list.join("\\n")).length);
    console.log(JSON.stringify({ wrong, empty, newer: more, whole, n: lines.length }));
    """,
        REPLAY,
    )
    assert out["wrong"] == [] and "a.ndjson holds no run_start" in out["empty"]
    assert out["newer"] == 3 and out["whole"] == out["n"]


def test_ticks_of_an_axis_differ_and_share_a_unit():
    script = """
    const { instant } = await import(`file://${process.argv[2]}/format.js`);
    const ticks = (first, step, end) => [0, 1, 2].map((n) => instant(first + n * step, step, end));
    const short = [ticks(2e5, 1e5, 9e6), ticks(1e3, 500, 9e3)];
    const long = [ticks(12.85e9, 5e7, 13.4e9), ticks(8e8, 2e8, 2.3e9), ticks(0, 1e9, 5e9)];
    console.log(JSON.stringify([...long, ...short]));
    """
    assert json.loads(javascript(script, STATIC)) == [
        ["12.85 s", "12.90 s", "12.95 s"],
        ["0.8 s", "1.0 s", "1.2 s"],
        ["0 s", "1 s", "2 s"],
        ["0.2 ms", "0.3 ms", "0.4 ms"],
        ["1.0 µs", "1.5 µs", "2.0 µs"],
    ]
