"""Linked selection in a real Chromium: choose in one panel, see it in all, by mouse and by keys."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.e2e
CHOSEN = "window.specviz.selection"


def chosen(page) -> dict:
    return page.evaluate(f"({CHOSEN}.chosen ? {CHOSEN}.current : null)")


def linked_rounds(page) -> set[int]:
    return set(page.evaluate("[...document.querySelectorAll('.sv-text .sv-linked')].map((node) => node.token.round)"))


def ringed(page, panel: str) -> int:
    """Points with a ring in the panel's first plot, once it was drawn."""
    page.locator(f".sv-panel-{panel}").scroll_into_view_if_needed()
    page.wait_for_selector(f".sv-panel-{panel} .js-plotly-plot")
    traces = f"document.querySelector('.sv-panel-{panel} .js-plotly-plot').data"
    return page.evaluate(f"{traces}.find((trace) => trace.name === 'chosen').x.length")


def test_a_token_shows_in_every_panel_until_escape(open_page):
    page = open_page("draft4")
    page.locator(".sv-text .sv-accepted").nth(3).click()
    token = chosen(page)["token"]
    words = page.locator(".sv-chosen")
    assert f"round {token['round']}" in words.inner_text()
    page.locator(".sv-text .sv-token").nth(1).hover()  # looking elsewhere does not let go
    assert chosen(page)["token"]["id"] == token["id"]
    assert ringed(page, "roofline") == ringed(page, "governor") == 1
    page.keyboard.press("Escape")
    assert chosen(page) is None and not words.is_visible()
    page.wait_for_function("document.querySelector('.sv-panel-governor .js-plotly-plot').data.at(-1).x.length === 0")


def test_a_round_of_the_timeline_shows_its_tokens(open_page):
    page = open_page("draft4")
    canvas = page.locator(".sv-panel-timeline canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    for x in range(130, int(box["width"]) - 20, 6):  # along the lane of the draft
        page.mouse.click(box["x"] + x, box["y"] + 46)
        if chosen(page):
            break
    round = chosen(page)["round"]
    assert linked_rounds(page) == {round}
    # And by keys.
    canvas.focus()
    page.keyboard.press("b")
    assert chosen(page) == {"kind": "round", "round": round - 1}
    assert linked_rounds(page) == {round - 1}


def test_a_cell_of_the_cache_shows_who_used_it(open_page):
    page = open_page("draft4")
    page.locator(".sv-panel-experts canvas").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert chosen(page) == {"kind": "expert", "layer": 1, "expert": 0}
    marked = page.evaluate(
        "[...document.querySelectorAll('.sv-text .sv-token')].map((node) =>"
        " [node.classList.contains('sv-linked'), node.token.experts?.[1]?.includes(0) ?? false])"
    )
    assert all(on == used for on, used in marked) and any(on for on, _ in marked)


@pytest.mark.parametrize("panel", ["roofline", "speed", "governor", "acceptance"])
def test_rows_of_tables_choose_by_keyboard(open_page, panel):
    page = open_page("draft4")
    section = page.locator(f".sv-panel-{panel}")
    section.get_by_role("button", name="Table").click()
    first = section.locator("tbody button").first
    first.focus()
    page.keyboard.press("Enter")
    expected = (
        {"kind": "position", "position": 0}
        if panel == "acceptance"
        else {"kind": "round", "round": int(first.inner_text())}
    )
    assert chosen(page) == expected
    assert page.locator(".sv-text .sv-linked").count() > 0


def test_a_click_on_a_plot_chooses(open_page):
    page = open_page("draft4")
    page.locator(".sv-panel-acceptance").scroll_into_view_if_needed()
    page.wait_for_selector(".sv-panel-acceptance .bars .point path")
    page.locator(".sv-panel-acceptance .sv-plot").nth(0).locator(".bars .point path").nth(1).hover(force=True)
    page.mouse.down()
    page.mouse.up()
    assert chosen(page) == {"kind": "position", "position": 1}
