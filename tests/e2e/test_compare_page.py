"""Compare, the measured baseline, and a number box that somebody empties: in a real browser, with the real engine."""

from __future__ import annotations

import re

from test_page import KNOBS, RUN, choose_slow_link, start, wait_for_status, wait_for_tokens

SENTENCE = ".sv-panel-{} .sv-sentence"


def shorten(page, tokens: int) -> None:
    page.get_by_text("Length, sampling and more").click()
    page.fill("#sv-max_new_tokens input[type=number]", str(tokens))
    page.keyboard.press("Tab")


def say(page, panel: str) -> str:
    return page.inner_text(SENTENCE.format(panel))


def wait_for_words(page, panel: str, words: str) -> None:
    page.wait_for_function(
        "([place, words]) => document.querySelector(place).textContent.includes(words)",
        arg=[SENTENCE.format(panel), words],
        timeout=90_000,
    )


def test_a_against_b_then_the_baseline_beside_the_draft(open_page, app):
    page = open_page()
    shorten(page, 32)
    page.get_by_role("button", name="Compare A with B").click()
    page.click("#sv-compare-go")
    wait_for_words(page, "compare", "both measured")
    verdict = say(page, "compare")
    assert "identical ✓" in verdict and re.search(r"(times as fast as|equally fast)", verdict)
    assert "Equal memory" in verdict  # the draft's bytes became slots
    assert "for equal memory" in page.inner_text(".sv-sides")
    page.locator(".sv-panel-compare").get_by_role("button", name="Table").click()
    rows = page.locator(".sv-panel-compare tbody tr")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == ["A", "B"]
    # B was plain decoding, so it is a baseline for the next run with a draft, at another memory.
    start(page, "#sv-generate")
    wait_for_status(page, "finished")
    wait_for_words(page, "speed", "measured:")
    assert "instead of" in say(page, "speed")
    # And the baseline of its own button has the same memory.
    start(page, "#sv-baseline")
    wait_for_status(page, "finished")
    start(page, "#sv-generate")
    wait_for_status(page, "finished")
    wait_for_words(page, "speed", "the same memory")


def test_a_reload_in_the_second_side_keeps_the_first(open_page, app):
    page = open_page(reloads=True)
    choose_slow_link(page)  # the second side must outlast the reload
    shorten(page, 24)
    page.get_by_role("button", name="Compare A with B").click()
    page.click("#sv-compare-go")
    wait_for_words(page, "compare", "A: finished")
    page.wait_for_function(f"{RUN}.status === 'running'")
    page.reload()
    page.wait_for_selector(SENTENCE.format("compare"), state="attached")
    wait_for_words(page, "compare", "both measured")
    assert "identical ✓" in say(page, "compare")


def test_stop_ends_the_comparison_and_an_emptied_box_changes_nothing(open_page, app):
    page = open_page()
    choose_slow_link(page)
    page.get_by_role("button", name="Compare A with B").click()
    page.click("#sv-compare-go")
    wait_for_tokens(page, 2)
    page.fill("#sv-k_max input[type=number]", "")  # on the way to another number
    page.wait_for_timeout(300)
    page.fill("#sv-k_max input[type=number]", "5")
    page.wait_for_function(f"{KNOBS}.some((knob) => knob.name === 'k_max' && knob.new === 5)")
    assert page.evaluate(f"{KNOBS}.every((knob) => knob.new !== null)")
    page.click("#sv-stop")
    wait_for_words(page, "compare", "there is nothing to compare")
    app.wait_until("idle", 5)
    assert "B" not in say(page, "compare").replace("A was stopped", "")
