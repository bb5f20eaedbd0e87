"""Whatever a model writes is shown as text: in the strip, the details, the tables, the facts and the pictures."""

from __future__ import annotations

import base64
import json
import xml.etree.ElementTree as ElementTree

import pytest
from hostile import TEXTS, hostile_run, one_long_word, text_of
from test_recordings import SAVE, open_file

pytestmark = pytest.mark.e2e
#: JavaScript's own view of a text, halves of characters and all, as plain ASCII.
UNITS = "(text) => Array.from({ length: text.length }, (_, i) => text.charCodeAt(i))"


def units(text: str) -> list[int]:
    data = text.encode("utf-16-le", "surrogatepass")
    return [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]


def show(page, run: str) -> None:
    """Play a run to its end and wait until all of its text is drawn."""
    assert open_file(page, "hostile.ndjson", run.encode()) is None
    page.evaluate("() => { const r = specviz.state.replay; r.loop = false; r.pause(); r.seek(r.end); }")
    page.wait_for_function("specviz.state.figures?.seq === specviz.state.metrics.seq")
    count = page.evaluate("specviz.state.scene.sequences[0].length")
    page.wait_for_function("n => document.querySelectorAll('.sv-text .sv-token').length === n", arg=count)


def check_unharmed(page) -> None:
    assert page.evaluate("window.pwned === undefined")
    assert page.locator(".sv :is(img, script, b b, iframe)").count() == 0
    for panel in page.locator(".sv-panel").all():
        assert panel.locator("text=/^bold$/").count() == 0  # markup would have made an element of it


def test_the_strip_holds_exactly_the_text(open_page):
    page = open_page("plain")
    run = hostile_run()
    show(page, run)
    shown = page.evaluate(f"({UNITS})(document.querySelector('.sv-text').textContent)")
    assert shown == units(text_of(run))
    check_unharmed(page)


def test_details_and_tables_name_each_text(open_page):
    page = open_page("plain", width=1100)
    run = hostile_run()
    show(page, run)
    tokens = page.locator(".sv-text .sv-token")
    for n in range(len(TEXTS)):
        tokens.nth(n).dispatch_event("click")
        page.wait_for_function(
            "n => document.querySelector('.sv-detail-text')?.textContent.length > 0"
            " && specviz.state.scene.sequences[0][n] !== undefined", arg=n,
        )  # fmt: skip
        said = page.evaluate("document.querySelector('.sv-detail-text').textContent")
        if "\ud800" <= TEXTS[n][:1] <= "\udfff":
            assert said == json.dumps(TEXTS[n])[1:-1]  # JavaScript writes half of a character as its number
        else:
            assert json.loads(f'"{said}"', strict=False) == TEXTS[n]
    for toggle in page.locator(".sv-panel button", has_text="Table").all():
        toggle.click()
    page.wait_for_function("document.querySelectorAll('.sv-panel-tokens tbody tr').length > 10")
    cells = page.eval_on_selector_all(
        ".sv-panel-tokens tbody td:nth-child(4)", "cells => cells.map((c) => c.textContent)"
    )
    assert any("onerror" in cell for cell in cells) and any("${window" in cell for cell in cells)
    check_unharmed(page)


def test_an_override_of_direction_ends_with_its_token(open_page):
    """Else one token could turn the order of all that follow."""
    page = open_page("plain")
    show(page, hostile_run())
    styles = page.eval_on_selector_all(
        ".sv-text .sv-token, .sv-drafts .sv-token", "nodes => nodes.map((node) => getComputedStyle(node).unicodeBidi)"
    )
    assert set(styles) <= {"isolate", "isolate-override", "plaintext"}, set(styles)


def test_pictures_are_well_formed_whatever_the_names(open_page):
    page = open_page("plain", width=900)
    show(page, hostile_run())
    svg = ElementTree.fromstring(base64.b64decode(page.evaluate(SAVE, "svg")))
    texts = "".join(text.text or "" for text in svg.iter("{http://www.w3.org/2000/svg}text"))
    assert "</script><script>" in texts and "${window.pwned=1}" in texts
    assert not list(svg.iter("{http://www.w3.org/2000/svg}script"))
    check_unharmed(page)


@pytest.mark.parametrize("width", [360, 1300])
def test_four_thousand_tokens_without_a_space_stay_in_their_box(open_page, width):
    page = open_page("plain", width=width)
    show(page, one_long_word())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.evaluate(
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('.sv-text'))"
    )
    assert box[0] <= box[1] + 1
