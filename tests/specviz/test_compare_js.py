"""What the compare and speed panels conclude, run in node on recorded runs."""

from __future__ import annotations

import json

import pytest
from node import GOLDEN, STATIC, javascript, needs_node

pytestmark = needs_node

START = """
import { readFileSync } from "node:fs";
const [base, golden] = process.argv.slice(2);
const { CURVE_LIMIT, Side, firstDifference, textWords, memoryWords, verdict } = await import(`file://${base}/compare.js`);
const { Baselines, answer, baselineWords } = await import(`file://${base}/baselines.js`);
const { reduce } = await import(`file://${base}/reducer.js`);
const lines = (name) => readFileSync(`${golden}/${name}.ndjson`, "utf-8").trimEnd().split("\\n");
const load = (name) => lines(name).map((line) => JSON.parse(line));
const side = (name, golden, change = (event) => event) => {
  const made = new Side(name, "");
  for (const event of load(golden)) made.add(change(event));
  return made;
};
const say = (value) => console.log(JSON.stringify(value));
"""


def run(script: str):
    return json.loads(javascript(START + script, STATIC, GOLDEN))


@pytest.mark.parametrize("name", ["draft4", "plain"])
def test_a_side_counts_what_the_metrics_count(name):
    out = run(f'const s = side("A", "{name}"); say([s.tokens, s.rate, s.text, s.ids.length, s.status]);')
    figures = json.loads((GOLDEN / f"{name}.metrics.json").read_text())
    assert out[0] == figures["acceptance"]["emitted"] == out[3]
    assert out[1] == pytest.approx(figures["time"]["mean_rate"], rel=0.02)  # which begins with the first round
    lines = (GOLDEN / f"{name}.ndjson").read_text(encoding="utf-8").splitlines()
    rounds = [event for event in map(json.loads, lines) if event["kind"] == "round"]
    tokens = [token for event in rounds for token in event["tokens"]]
    assert out[2] == "".join(token["text"] for token in tokens)
    assert out[4] == "finished"


def test_the_verdict_names_the_measured_ratio_the_text_and_the_memory():
    """B is A at half the pace, with one slot less in each layer."""
    out = run("""
    const slower = (event) => {
      const late = { ...event, t: event.t * 2 };
      if (event.start !== undefined) late.start = event.start * 2;
      if (event.kind !== "run_start") return late;
      const { memory } = event;
      return { ...late, memory: { ...memory, total: memory.total - memory.cache / event.slots_per_layer * 2 } };
    };
    const [a, b] = [side("A", "draft4"), side("B", "draft4", slower)];
    say([verdict(a, b), verdict(b, a), verdict(a, a)]);
    """)
    assert "A is 2.00 times as fast as B" in out[0] and "both measured" in out[0] and "Not equal memory" in out[0]
    assert "identical ✓" in out[0]
    assert "A is 2.00 times" in out[1] and "equally fast" in out[2]
    assert "Equal memory" in out[2] and " each" in out[2]


def test_texts_that_part_say_where_and_whether_they_may():
    out = run("""
    const [a, b] = [side("A", "draft4"), side("B", "draft4")];
    b.ids[7] = -1;
    const said = [["float32", 0], ["bfloat16", 0], ["float32", 0.7]].map(([dtype, temperature]) => {
      a.facts = { ...a.facts, config: { ...a.facts.config, dtype, temperature } };
      return textWords(a, b);
    });
    say([said, firstDifference([1, 2], [1, 2]), firstDifference([1, 2], [1, 2, 3]), firstDifference([], [])]);
    """)
    assert all("from token 8 on" in words for words in out[0])
    assert "must not" in out[0][0] and "near ties" in out[0][1] and "draws its own" in out[0][2]
    assert out[1:] == [None, 2, None]


def test_a_curve_is_bounded_and_ends_where_the_run_ends():
    out = run("""
    const long = new Side("A", "");
    const round = { kind: "round", sequence: 0, tokens: [{ id: 1, text: "a" }] };
    for (let i = 1; i <= 5000; i++) long.add({ ...round, t: i, start: i - 1 });
    say([long.curve.length <= CURVE_LIMIT, long.tokens, long.rate]);
    """)
    assert out == [True, 5000, pytest.approx(1e9)]


def test_only_a_measured_plain_run_of_the_same_request_is_a_baseline():
    out = run("""
    const store = new Baselines();
    const [plain, drafting] = ["plain", "draft4"].map((name) => reduce(load(name)).toJSON());
    const stopped = { ...plain, run: { ...plain.run, status: "stopped" } };
    const kept = [drafting, stopped, plain].map((figures) => store.note(figures, "p"));
    const other = { ...plain.facts, config: { ...plain.facts.config, seed: 77 } };
    const found = store.find(plain.facts, "p");
    say([kept, found?.rate, [store.find(plain.facts, "q"), store.find(other, "p"), store.find(null, "p")],
      baselineWords(found, plain.facts, 2 * found.rate, String, String)]);
    """)
    figures = json.loads((GOLDEN / "plain.metrics.json").read_text())
    assert out[0] == [False, False, True]
    assert out[1] == figures["time"]["mean_rate"]
    assert out[2] == [None, None, None]
    assert "2.00 ×" in out[3] and "the same memory" in out[3] and "It pays, measured" in out[3]


def test_whether_it_pays_is_said_first_and_noise_is_no_answer():
    out = run('say([1.5, 1.02, 0.98, 0.6].map((ratio) => answer(ratio, "predicted")));')
    assert out == [
        "It pays, predicted", "It makes no difference, predicted", "It makes no difference, predicted",
        "It does not pay, predicted",
    ]  # fmt: skip


def test_fast_memory_follows_the_slots():
    out = run("""
    globalThis.document = {};
    const { memoryNow } = await import(`file://${base}/views/header.js`);
    const facts = { slots_per_layer: 4, memory: { shared: 10, cache: 8, total: 18 } };
    say([memoryNow(facts, 4), memoryNow(facts, 12), memoryNow(facts, null)]);
    """)
    assert [memory["cache"] for memory in out] == [8, 24, 8]
    assert [memory["total"] for memory in out] == [18, 34, 18]


def test_a_change_of_k_says_from_what():
    out = run("""
    globalThis.document = {};
    const { changed } = await import(`file://${base}/views/governor.js`);
    const choice = (k) => ({ k, auto: true, probing: false, reason: `k = ${k} promises most` });
    say([changed(choice(3)), changed(choice(8), choice(3)), changed(choice(8), choice(8))]);
    """)
    assert out == [
        "The governor: k = 3 promises most", "The governor: k = 3 → 8 promises most",
        "The governor: k = 8 promises most",
    ]  # fmt: skip


def test_the_governors_line_says_what_it_chose_once():
    out = run("""
    globalThis.document = {};
    const { words } = await import(`file://${base}/views/governor.js`);
    const choice = (reason, auto, probing = false, k = 8) => words({ k, auto, probing, reason });
    const promise = choice("k = 8 with prefetch still promises most: 40 tokens/s", true);
    say([
      promise, choice("k = 8 was set by hand; k = 3 would", false),
      choice("probing k = 0 to see whether k = 8 is still right", true, true, 0),
      choice("measuring a round with k = 4 with prefetch first", true, true, 4),
      choice("k = 16 promises 9 tokens/s, 20% more than k = 1", true, false, 16),
      choice("no drafter: plain decoding", true, false, 0),
    ]);
    """)
    assert out == [
        "The governor: k = 8 with prefetch still promises most: 40 tokens/s",
        "k = 8 was set by hand; k = 3 would",
        "A probe: k = 0 to see whether k = 8 is still right",
        "A probe: measuring a round with k = 4 with prefetch first",
        "The governor: k = 16 promises 9 tokens/s, 20 % more than k = 1",
        "k = 0, the governor: no drafter: plain decoding",
    ]
