"""The browser side in a real Chromium, playing golden recordings: what it shows, and what it must never do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specviz.whatif import simulate

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.e2e


def events(name: str, kind: str) -> list[dict]:
    lines = (GOLDEN / f"{name}.ndjson").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def model_text(name: str) -> str:
    prompt = "".join(token["text"] for token in events(name, "run_start")[0]["prompts"][0])
    return prompt + "".join(token["text"] for round in events(name, "round") for token in round["tokens"])


def test_hostile_text_is_shown_as_text_and_copied_exactly(open_page):
    page = open_page("stopped")  # its words are template literals, tags and overrides of direction
    expected = model_text("stopped")
    assert "<img" in expected and "${" in expected and "\u202e" in expected
    page.wait_for_function(
        "n => document.querySelectorAll('.sv-text .sv-token').length === n",
        arg=3 + len([t for r in events("stopped", "round") for t in r["tokens"]]),
    )
    assert page.locator(".sv-text").evaluate("node => node.textContent") == expected
    copied = page.evaluate(
        """() => {
          const range = document.createRange();
          range.selectNodeContents(document.querySelector('.sv-panel-tokens'));
          getSelection().removeAllRanges();
          getSelection().addRange(range);
          return getSelection().toString();
        }"""
    )
    assert "oops" not in copied  # rejected drafts cannot be selected
    assert page.locator(".sv img, .sv script").count() == 0
    for index in range(3, 20):
        page.locator(".sv-text .sv-token").nth(index).hover()
    assert page.locator(".sv-detail img").count() == 0


def test_states_legend_and_detail(open_page):
    page = open_page("draft4")
    rounds = events("draft4", "round")
    for state in ("accepted", "corrected", "bonus"):
        count = sum(token["state"] == state for round in rounds for token in round["tokens"])
        # The strip is drawn with the next frame.
        page.wait_for_function(
            "([state, n]) => document.querySelectorAll(`.sv-text .sv-${state}`).length === n", arg=[state, count]
        )
    page.locator(".sv-text .sv-accepted").first.hover()
    first = rounds[0]["tokens"][0]
    detail = page.locator(".sv-detail").inner_text()
    assert "accepted draft token" in detail
    assert f"{first['p_target']:.3f}" in detail and f"{first['p_draft']:.3f}" in detail
    page.get_by_role("button", name="Rejected lane").click()
    assert not page.locator(".sv-drafts").is_visible()


def test_keyboard_walks_over_tokens(open_page):
    page = open_page("draft4")
    page.locator('.sv-text [tabindex="0"]').focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.token.text") == events("draft4", "round")[0]["tokens"][0]["text"]
    assert page.locator('.sv-text [tabindex="0"]').count() == 1


@pytest.mark.parametrize("query", ["", "?dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_nothing_overflows(open_page, width, query):
    page = open_page("stopped", width=width, query=query)
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_plots_are_made_once(open_page):
    page = open_page("draft4", at=0.1)
    page.evaluate(
        """() => {
          window.made = { newPlot: 0, react: 0 };
          for (const name of Object.keys(made)) {
            const real = Plotly[name];
            Plotly[name] = (...all) => { made[name]++; return real(...all); };
          }
        }"""
    )
    page.locator(".sv-panel-governor").scroll_into_view_if_needed()
    page.evaluate("specviz.state.replay.speed = 0.5; specviz.state.replay.play()")
    page.wait_for_function("made.react >= 3")
    assert page.evaluate("made.newPlot") <= page.locator(".sv-plot").count()
    made = page.evaluate("made.newPlot")
    page.evaluate("specviz.state.replay.seek(0); specviz.state.replay.play(); made.react = 0")
    page.wait_for_function("made.react >= 3")
    assert page.evaluate("made.newPlot") == made


def test_timeline_follows_freezes_and_tells(open_page):
    page = open_page("draft4")
    canvas = page.locator(".sv-panel-timeline canvas")
    inked = """node => new Set(node.getContext('2d').getImageData(0, 0, node.width, node.height).data).size"""
    assert canvas.evaluate(inked) > 20
    follow = page.get_by_role("button", name="Follow")
    assert follow.get_attribute("aria-pressed") == "true"
    canvas.focus()
    page.keyboard.press("f")
    assert page.get_by_role("button", name="Frozen").get_attribute("aria-pressed") == "false"
    box = canvas.bounding_box()
    tip = page.locator(".sv-panel-timeline .sv-tip")
    for x in range(130, int(box["width"]) - 20, 6):
        page.mouse.move(box["x"] + x, box["y"] + 130)
        if tip.is_visible():
            break
    assert "experts" in tip.inner_text() or "Stall" in tip.inner_text()


def test_tables_give_the_numbers(open_page):
    page = open_page("draft4")
    for panel in ("tokens", "timeline", "experts", "acceptance", "roofline", "speed", "governor"):
        section = page.locator(f".sv-panel-{panel}")
        section.get_by_role("button", name="Table").click()
        assert section.locator("tbody tr").count() > 0
    expected = json.loads((GOLDEN / "draft4.metrics.json").read_text())["acceptance"]["by_position"][0]
    cells = page.locator(".sv-panel-acceptance tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] == ["1", str(expected["verified"]), str(expected["accepted"])]


@pytest.mark.parametrize("name", ["draft4", "plain"])
def test_speed_says_against_what_the_draft_pays(open_page, name):
    page = open_page(name)
    said = page.locator(".sv-panel-speed").inner_text()
    latest = json.loads((GOLDEN / f"{name}.metrics.json").read_text())["governor"]["latest"]
    if latest["k"]:
        ratio = latest["predicted_rate"][latest["k"]] / latest["predicted_rate"][0]
        assert ratio > 1.03
        assert re.search(rf"It pays, predicted: [\d.]+ tokens/s with k = {latest['k']}, [\d.]+ without a draft", said)
    else:
        assert "Nothing is drafted now" in said


@pytest.mark.parametrize(("panel", "axis"), [("governor", "xaxis"), ("acceptance", "yaxis")])
def test_rounds_are_whole_on_every_axis(open_page, panel, axis):
    page = open_page("hand")  # two rounds
    page.locator(f".sv-panel-{panel}").scroll_into_view_if_needed()
    plots = f".sv-panel-{panel} .js-plotly-plot"
    page.wait_for_selector(plots)
    layout = page.evaluate(f"[...document.querySelectorAll('{plots}')].at(-1)._fullLayout.{axis}.dtick")
    assert layout == 1


def test_header_says_what_is_what(open_page):
    page = open_page("draft4")
    header = page.locator(".sv-header").inner_text()
    assert "recording" in header
    assert "emulated" in header
    assert "finished" in header


def test_mounts_once_and_survives_a_new_root(open_page):
    page = open_page("draft4")
    page.evaluate(
        """() => {
          window.before = document.querySelector('.sv');
          document.getElementById('specviz-root').remove();
          const root = document.createElement('div');
          root.id = 'specviz-root';
          document.body.append(root);
        }"""
    )
    page.wait_for_function("document.querySelector('#specviz-root .sv') === before")
    assert page.locator(".sv").count() == 1


def test_missing_plotly_is_said(browser, site):
    page = browser.new_page()
    page.route("**/plotly.min.js", lambda route: route.abort())
    page.goto(site("draft4"))
    page.locator(".sv-failure").first.wait_for(state="attached")
    assert "plotly.min.js did not arrive" in page.locator(".sv-failure").first.text_content()
    page.close()


def test_the_kernels_in_use_are_told_and_their_absence_is_marked(open_page):
    fact = ".sv-fact:has(dt:text-is('Kernels'))"
    page = open_page("draft4")
    assert page.locator(f"{fact} dd").inner_text() == "avx512"
    assert page.locator(f"{fact}.sv-marked").count() == 0
    page = open_page("plain")
    assert page.locator(f"{fact}.sv-marked dd").inner_text() == "torch (switched off (SPECVIZ_KERNELS=off))"
    page = open_page("hand")  # recorded before there were kernels
    assert page.locator(fact).count() == 0


def test_what_if_answers_settings_without_a_run(open_page):
    page = open_page("draft4")
    panel = page.locator(".sv-panel-whatif")
    panel.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelectorAll('.sv-policy').length === 4")
    panel.get_by_label("Machine").select_option("a30")
    panel.get_by_label("Model").select_option("mixtral-8x7b")
    report = simulate({"hardware": "a30", "model": "mixtral-8x7b"})
    page.wait_for_function(
        "words => document.querySelector('.sv-panel-whatif .sv-sentence').textContent.startsWith(words)",
        arg=f"{report['model']} on {report['hardware']}",
    )
    expected = report["policies"]
    rates = panel.locator(".sv-policy-rate").all_inner_texts()
    assert rates[0] == f"{expected[0]['tokens_per_second']:.2f} tokens/s" and rates[1] == "–"
    assert "does not fit" in panel.locator(".sv-policy").nth(1).inner_text()
    # Another policy's iteration, by keyboard.
    panel.locator(".sv-policy").nth(2).focus()
    page.keyboard.press("Enter")
    assert "One iteration of streamed, no draft" in panel.locator("h4").first.inner_text()
    # What is refused says why, and the last answer stays.
    panel.get_by_label("Batch").fill("5000")
    page.wait_for_selector(".sv-whatif-settings .sv-notice:not([hidden])")
    assert "out of range" in panel.locator(".sv-notice").inner_text()
    panel.get_by_text("The papers' tables").click()
    page.wait_for_function("document.querySelectorAll('.sv-papers tbody tr').length > 40")
    assert "4.39" in panel.locator(".sv-papers tbody tr").first.inner_text()


def test_the_roofline_has_a_second_tab_for_phases(open_page):
    page = open_page("draft4")
    panel = page.locator(".sv-panel-roofline")
    panel.get_by_role("button", name="Hierarchical").click()
    page.wait_for_function(
        "[...document.querySelectorAll('.sv-panel-roofline .js-plotly-plot')].some((plot) => "
        "plot.data.some((trace) => trace.name === 'experts, whole round'))"
    )
    assert panel.get_by_role("button", name="Amortization").get_attribute("aria-pressed") == "false"
    panel.get_by_role("button", name="Table").click()
    phases = panel.locator("tbody tr td:first-child").all_inner_texts()
    assert phases == ["draft", "shared weights", "experts", "experts, whole round"]
