"""Whatever a model writes is shown as text: in strip, details, tables, facts, pictures, and the difference of two."""

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


#: Plays both sides of a comparison, each from its lines, over a websocket that never leaves the page.
COMPARE = """async ({ lines, label }) => {
    let socket;
    window.WebSocket = class { constructor() { socket = this; } send() {} close() {} };
    for (const side of ["A", "B"]) {
        specviz.attach({ run: side, token: "t", compare: { side, label, first: side === "A" } });
        socket.onopen();
        const events = lines[side].split("\\n").map((line) => JSON.parse(line));
        const told = { v: 1, run: side, from: 1, to: events.at(-1).seq, lost: 0, events };
        socket.onmessage({ data: JSON.stringify(told) });
    }
}"""
DIFFERENCE = f"""() => [...document.querySelectorAll('.sv-diff p')].map(
    (row) => [...row.querySelectorAll('.sv-diff-text')].map((node) => ({UNITS})(node.textContent)))"""


def compare(page, one: str, other: str) -> list[list[list[int]]]:
    """What is shown of both texts: of each its parts, as their units."""
    page.evaluate(COMPARE, {"lines": {"A": one, "B": other}, "label": "".join(TEXTS)})
    page.wait_for_function("document.querySelectorAll('.sv-diff-text').length > 0")
    return page.evaluate(DIFFERENCE)


def with_last_tokens(run: str, texts: tuple[str, ...]) -> str:
    """The run, but its last round wrote other tokens."""
    events = [json.loads(line) for line in run.splitlines()]
    last = [event for event in events if event["kind"] == "round"][-1]
    last["tokens"] = [{**last["tokens"][0], "id": -n, "text": text} for n, text in enumerate(texts, start=1)]
    return "\n".join(map(json.dumps, events))


def generated(run: str) -> str:
    rounds = [event for event in map(json.loads, run.splitlines()) if event["kind"] == "round"]
    return "".join(token["text"] for event in rounds for token in event["tokens"])


def test_the_difference_of_two_texts_is_text(open_page):
    page = open_page("plain")
    run = hostile_run()
    # They part within an emoji, whose halves are worth nothing alone; and before an override that nobody ends.
    one, other = (with_last_tokens(run, texts) for texts in [("😀", *TEXTS), ("😁", "\u202eevil", *TEXTS[::-1])])
    shown = compare(page, one, other)
    assert [sum(parts, []) for parts in shown] == [units(generated(one)), units(generated(other))]
    shared = shown[0][0]
    assert shared == shown[1][0] and not 0xD800 <= shared[-1] < 0xDC00 and shown[0][1][:2] == units("😀")
    assert page.evaluate(f"({UNITS})(document.querySelector('.sv-sides dd').textContent)") == units("".join(TEXTS))
    styles = page.eval_on_selector_all(".sv-diff-text", "nodes => nodes.map((n) => getComputedStyle(n).unicodeBidi)")
    assert set(styles) == {"isolate"}
    page.locator(".sv-panel-compare").get_by_role("button", name="Table").click()
    cells = page.eval_on_selector_all(
        ".sv-panel-compare tbody td", f"cells => cells.map((c) => ({UNITS})(c.textContent))"
    )
    assert units("".join(TEXTS)) in cells
    check_unharmed(page)


@pytest.mark.parametrize("width", [360, 1300])
def test_a_difference_without_a_space_stays_in_its_box(open_page, width):
    page = open_page("plain", width=width)
    shown = compare(page, one_long_word(), with_last_tokens(one_long_word(), ("other",)))
    assert [len(sum(parts, [])) for parts in shown] == [4 * 4000, 4 * 3999 + 5]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for node in page.evaluate("[...document.querySelectorAll('.sv-diff')].map((n) => [n.scrollWidth, n.clientWidth])"):
        assert node[0] <= node[1] + 1


@pytest.mark.parametrize("width", [360, 1300])
def test_four_thousand_tokens_without_a_space_stay_in_their_box(open_page, width):
    page = open_page("plain", width=width)
    show(page, one_long_word())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.evaluate(
        "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('.sv-text'))"
    )
    assert box[0] <= box[1] + 1
