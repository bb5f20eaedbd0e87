"""Clicks on the buttons that start runs, run in node: none is lost, and a page has one run at a time."""

from __future__ import annotations

import json

from node import STATIC, javascript, needs_node

pytestmark = needs_node

# A clock that the test moves, and buttons whose clicks Gradio either gets or not.
WORLD = """
let now = 1000;
let timers = [];
globalThis.setTimeout = (action, ms) => void timers.push({ at: now + ms, action });
const pass = (ms) => {
  const until = now + ms;
  for (;;) {
    const due = timers.filter(({ at }) => at <= until).sort((a, b) => a.at - b.at)[0];
    if (!due) break;
    now = due.at;
    timers = timers.filter((timer) => timer !== due);
    due.action();
  }
  now = until;
};
const { Presses } = await import(`file://${process.argv[2]}/press.js`);
const page = { status: "running", told: [], taken: [] };
const presses = new Presses({ status: () => page.status, tell: (words) => page.told.push(words), now: () => now });
const button = (name) => ({ click() { if (presses.clicked(this)) page.taken.push([name, now]); } });
const [generate, baseline] = [button("generate"), button("baseline")];
"""


def run(script: str) -> dict:
    return json.loads(javascript(WORLD + script + "console.log(JSON.stringify(page));", STATIC))


def test_a_click_goes_on_at_once_when_nothing_is_on():
    page = run("generate.click(); presses.began('a'); presses.ended('a'); pass(1000); generate.click();")
    assert [name for name, _ in page["taken"]] == ["generate"] * 2


def test_a_click_after_a_stop_is_made_again_when_the_run_has_ended():
    page = run("""
    presses.began("a");
    presses.stopped();
    generate.click(); // once more, by an impatient person
    generate.click();
    pass(700);
    presses.ended("a");
    pass(2000);
    """)
    ((name, at),) = page["taken"]
    assert name == "generate" and 2000 <= at <= 2050  # the end at 1700, and 300 ms for Gradio
    assert "starts then" in page["told"][0] and page["told"][-1] is None


def test_a_click_while_the_run_is_on_is_refused_in_words():
    page = run('presses.began("a"); baseline.click(); pass(10_000);')
    assert page["taken"] == [] and "press Stop first" in page["told"][0]


def test_the_refusal_goes_when_the_run_ends():
    page = run('presses.began("a"); generate.click(); presses.ended("a");')
    assert page["told"][-1] is None


def test_an_end_that_never_comes_is_not_waited_for_for_ever():
    page = run('presses.began("a"); page.status = "finished"; generate.click(); pass(20_000);')
    ((_, at),) = page["taken"]
    assert 6000 <= at <= 6100


def test_the_end_of_the_first_side_of_a_comparison_is_not_that_of_the_second():
    page = run('presses.began("a"); presses.began("b"); presses.ended("a"); pass(1000); generate.click();')
    assert page["taken"] == [] and "still on" in page["told"][0]
