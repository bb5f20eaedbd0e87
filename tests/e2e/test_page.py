"""What a person sees and does, in a real browser against the real engine."""

from __future__ import annotations

import json
import re

import pytest

RUN = "window.specviz.state.metrics.run"
KNOBS = "window.specviz.state.scene.knobs"
GENERATED = ":is(.sv-accepted, .sv-corrected, .sv-bonus, .sv-plain)"
TOKENS = f".sv-text .sv-token{GENERATED}"
#: A link so slow that a run is still on when a person moves a knob.
SLOW_LINK = "Emulated: Mixtral"


def mode(page) -> str:
    return page.get_attribute(".sv-badge", "data-mode")


def wait_for_status(page, *statuses: str, timeout: float = 90_000) -> str:
    page.wait_for_function(
        f"statuses => window.specviz.state.run && statuses.includes({RUN}.status)", arg=list(statuses), timeout=timeout
    )
    return page.evaluate(f"{RUN}.status")


def wait_for_tokens(page, count: int, live: bool = True) -> None:
    shown = "window.specviz.state.run" if live else "window.specviz.state.replay"
    page.wait_for_function(f"n => {shown} && document.querySelectorAll({json.dumps(TOKENS)}).length >= n", arg=count)


def start(page, button: str) -> None:
    """Press `button` and wait for the run that it starts."""
    before = page.evaluate("window.specviz.state.run")
    page.click(button)
    page.wait_for_function(
        f"before => window.specviz.state.run && window.specviz.state.run !== before && {RUN}.status === 'running'",
        arg=before,
    )


def choose_slow_link(page) -> None:
    page.click("#sv-link input")
    page.get_by_role("option", name=SLOW_LINK).click()


def export(page, app, name: str) -> str:
    """An export of the page's run, through the address that its download button uses."""
    if not page.is_visible("#sv-download-trace"):
        page.get_by_text("Save this run").click()
    with page.expect_download() as download:
        page.click(f"#sv-download-{name}")
    return download.value.path().read_text()


def test_the_page_opens_on_a_recording_that_says_so(open_page):
    page = open_page()
    page.wait_for_function("document.querySelector('.sv-badge').dataset.mode === 'recording'")
    assert "recording" in page.inner_text(".sv-badge").lower()
    wait_for_tokens(page, 5, live=False)
    assert page.inner_text(".sv-facts")


def test_generate_streams_coloured_tokens_over_the_websocket(open_page, app):
    page = open_page()
    page.click("#sv-generate")
    wait_for_tokens(page, 100)
    assert wait_for_status(page, "finished", "failed") == "finished"
    assert mode(page) == "live"
    summary = json.loads(export(page, app, "summary"))
    assert summary["status"] == "finished"
    new_tokens = summary["results"][0]["new_tokens"]
    wait_for_tokens(page, new_tokens)  # figures come first, pictures with the next frame
    states = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(TOKENS)})].map(node => "
        "[[...node.classList].find(name => /^sv-(accepted|corrected|bonus|plain)$/.test(name)), "
        "getComputedStyle(node).backgroundColor])"
    )
    assert len(states) == new_tokens >= 100
    colours = dict(states)
    assert len(colours) >= 2 and len(set(colours.values())) == len(colours)
    # What is copied from the page is exactly what the model wrote.
    shown = page.evaluate("document.querySelector('.sv-text').textContent")
    assert summary["results"][0]["text"] in shown
    trace = json.loads(export(page, app, "trace"))
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "M", "C"}
    events = [json.loads(line) for line in export(page, app, "events").splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))


def test_a_knob_takes_effect_while_the_run_goes_on_and_stop_stops(open_page, app):
    page = open_page()
    choose_slow_link(page)
    page.click("#sv-generate")
    wait_for_tokens(page, 3)
    before = page.evaluate("window.specviz.state.scene.rounds.at(-1).round")
    page.focus("#sv-k input[type=range]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"{KNOBS}.some(knob => knob.name === 'k' && knob.new === 6)")
    knob = page.evaluate(f"{KNOBS}.filter(knob => knob.name === 'k').at(-1)")
    assert knob["round"] > before and knob["old"] in ("auto", 5)
    page.wait_for_selector(".sv-reason-knob")
    assert "6" in page.inner_text(".sv-reason-knob >> nth=0")
    assert not page.is_checked("#sv-k-auto input")
    assert app.health()["engine"] == "running"
    page.click("#sv-stop")
    assert wait_for_status(page, "stopped", "finished") == "stopped"
    app.wait_until("idle", 5)
    tokens = page.locator(TOKENS).count()
    page.wait_for_timeout(500)
    assert page.locator(TOKENS).count() == tokens < 160
    # And the next run works.
    page.click("#sv-generate")
    page.wait_for_function(f"{RUN}.status === 'running'")
    wait_for_tokens(page, 1)
    page.click("#sv-stop")
    assert wait_for_status(page, "stopped", "finished") == "stopped"


@pytest.mark.parametrize("losses", [False, True], ids=["all batches", "every other batch"])
def test_without_a_websocket_all_tokens_come_through_the_generator(open_page, app, losses):
    page = open_page(script="window.WebSocket = class { constructor() { throw new Error('refused'); } };")
    if losses:
        # Gradio skips values that come while a tab is hidden.
        page.evaluate(
            """() => {
                const receive = window.specvizBridge.receive;
                let n = 0;
                window.specvizBridge.receive = (text) => {
                    if (!text.startsWith('{"op":"feed"') || n++ % 2) receive(text);
                };
            }"""
        )
    page.click("#sv-generate")
    assert wait_for_status(page, "finished", "failed") == "finished"
    assert mode(page) == "compat"
    summary = json.loads(export(page, app, "summary"))
    new_tokens = summary["results"][0]["new_tokens"]
    wait_for_tokens(page, new_tokens)
    assert page.locator(TOKENS).count() == new_tokens >= 100
    assert page.evaluate("window.specviz.state.metrics.lost") == 0


def test_two_visitors_see_their_own_runs(open_page, app):
    pages = [open_page(), open_page()]
    prompts = ["Tom had a red kite.", "The little frog was"]
    for page, prompt in zip(pages, prompts, strict=True):
        page.fill("#sv-prompt textarea", prompt)
    for page in pages:
        page.click("#sv-generate")
    for page, prompt in zip(pages, prompts, strict=True):
        assert wait_for_status(page, "finished", "failed") == "finished"
        shown = page.evaluate("document.querySelector('.sv-text').textContent")
        assert f"{prompt} " in shown and sum(other in shown for other in prompts) == 1
    assert pages[0].evaluate("window.specviz.state.run") != pages[1].evaluate("window.specviz.state.run")


def test_a_refused_request_says_why(open_page):
    page = open_page()
    page.fill("#sv-prompt textarea", "  ")
    page.click("#sv-generate")
    page.get_by_text("the prompt is empty").first.wait_for()


def test_a_tab_that_closes_leaves_the_server_to_others(open_page, app):
    page = open_page()
    choose_slow_link(page)
    page.click("#sv-generate")
    wait_for_tokens(page, 1)
    page.close()
    other = open_page()
    other.click("#sv-generate")
    other.wait_for_function(f"window.specviz.state.run && {RUN}.phase === 'queued' || {RUN}.status === 'running'")
    other.click("#sv-stop")
    assert wait_for_status(other, "stopped", "finished")


def test_a_phone_is_wide_enough(open_page):
    page = open_page(width=360, height=740, color_scheme="dark")
    page.click("#sv-generate")
    wait_for_tokens(page, 20)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for part in ("#sv-prompt", "#specviz-root", ".sv-text"):
        assert page.locator(part).bounding_box()["width"] > 280, part
    assert not page.is_visible("#sv-k input[type=range]"), "the knobs stand between the prompt and the panels"
    wait_for_status(page, "finished")


def test_a_click_right_after_a_stop_starts_a_run_and_one_while_it_is_on_is_refused(open_page, app):
    page = open_page()
    choose_slow_link(page)
    page.click("#sv-generate")
    wait_for_tokens(page, 2)
    first = page.evaluate("window.specviz.state.run")
    page.click("#sv-generate")
    page.wait_for_function("document.querySelector('.sv-notice').textContent.includes('still on')")
    assert page.evaluate("window.specviz.state.run") == first and app.health()["waiting"] == 0
    page.evaluate("for (const id of ['sv-stop', 'sv-generate']) document.getElementById(id).click()")
    page.wait_for_function(f"window.specviz.state.run !== {first!r} && {RUN}.status === 'running'")
    page.click("#sv-stop")
    wait_for_status(page, "stopped")


def test_on_a_phone_a_click_brings_the_run_into_sight_and_a_stop_beside_it(open_page, app):
    page = open_page(width=360, height=740)
    page.wait_for_function("!document.querySelector('#sv-controls .label-wrap.open')")  # folded on a phone
    page.locator("#sv-controls .label-wrap").filter(has_text=re.compile("^ *Link")).click()
    choose_slow_link(page)
    page.click("#sv-generate")
    wait_for_tokens(page, 2)
    stop = page.locator(".sv-stop-near")
    page.wait_for_function("document.querySelector('.sv-header').getBoundingClientRect().top < 100")
    assert stop.is_visible()
    stop.click()
    assert wait_for_status(page, "stopped") and not stop.is_visible()
