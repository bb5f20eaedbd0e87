"""The tour, presets and links, in a real browser."""

from __future__ import annotations

from test_page import RUN, wait_for_status, wait_for_tokens


def settings(page) -> dict:
    """What the controls show."""
    return page.evaluate(
        """() => ({
            k: document.querySelector('#sv-k input[type=number]').value,
            auto: document.querySelector('#sv-k-auto input').checked,
            slots: document.querySelector('#sv-slots input[type=number]').value,
            draft: document.querySelector('#sv-draft input').value,
            prompt: document.querySelector('#sv-prompt textarea').value,
        })"""
    )


def wait_for_settings(page, **expected) -> None:
    for _ in range(60):
        if expected.items() <= settings(page).items():
            return
        page.wait_for_timeout(50)
    assert expected.items() <= settings(page).items()


def test_the_tour_sets_the_page_up_step_by_step_and_gives_back_what_was_set(open_page, app):
    page = open_page()
    page.fill("#sv-slots input[type=number]", "9")
    page.keyboard.press("Tab")
    before = settings(page)
    page.get_by_role("button", name="Tour").click()
    titles = []
    for step in range(8):
        titles.append(page.inner_text(".sv-tour-title"))
        assert page.inner_text(".sv-tour-count") == f"{step + 1} of 8"
        assert page.locator(".sv-toured").count() == 1
        if step == 1:
            wait_for_settings(page, auto=False, k="0", slots="4", draft="none (plain decoding)")
        if step == 4:
            wait_for_settings(page, auto=False, k="8", draft="sparse-1 (one resident expert a token)")
        if step == 6:
            page.wait_for_function(
                "document.querySelector('.sv-panel-whatif .sv-sentence').textContent.includes('Mixtral-8x7B on')"
            )
        assert app.health()["engine"] == "idle"  # a step sets up; a person runs
        page.get_by_role("button", name="Done" if step == 7 else "Next").click()
    assert len(set(titles)) == 8 and not page.is_visible(".sv-tour")
    assert before["slots"] == "9" and before["auto"]
    wait_for_settings(page, **before)
    page.wait_for_function("document.querySelector('#sv-whatif-k').value === '8'")
    assert page.evaluate("document.querySelector('#sv-whatif-batch').value") == "1"


def test_a_preset_then_a_link_that_brings_it_back_without_running(open_page, app):
    page = open_page()
    page.click("#sv-preset-loss")
    wait_for_settings(page, auto=False, k="8", slots="4")
    assert "half as fast" in page.input_value("#sv-preset-words textarea")
    page.fill("#sv-prompt textarea", "A <b>bold</b> fox & ${x}")
    page.locator(".sv-panel-whatif").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('#sv-whatif-hardware').options.length > 1")
    page.select_option("#sv-whatif-hardware", "a30")
    page.fill("#sv-whatif-batch", "12")
    page.click("#sv-link-button")
    page.wait_for_function("location.search.includes('sv.draft=sparse-1')")
    address = page.evaluate("location.href")
    page.goto(address)
    page.wait_for_selector("#sv-generate")
    wait_for_settings(page, auto=False, k="8", slots="4", prompt="A <b>bold</b> fox & ${x}")
    page.locator(".sv-panel-whatif").scroll_into_view_if_needed()
    page.wait_for_function(
        "document.querySelector('#sv-whatif-hardware').value === 'a30'"
        " && document.querySelector('#sv-whatif-batch').value === '12'"
    )
    page.wait_for_timeout(500)
    assert app.health()["engine"] == "idle"


def test_a_tour_step_moves_the_live_knobs_of_a_run(open_page, app):
    page = open_page()
    page.click("#sv-preset-stalls")
    wait_for_settings(page, k="0", slots="2")
    page.click("#sv-generate")
    wait_for_tokens(page, 2)
    page.click("#sv-preset-hiding")
    page.wait_for_function("window.specviz.state.scene.knobs.some((knob) => knob.name === 'slots' && knob.new === 4)")
    page.click("#sv-stop")
    assert wait_for_status(page, "stopped", "finished")
    assert page.evaluate(f"{RUN}.error") is None


def test_several_sequences_are_written_at_once(open_page, app):
    page = open_page()
    box = page.locator("#sv-sequences input[type=number]")
    box.fill("3")
    box.press("Tab")
    page.wait_for_function("document.querySelector('#sv-sequences input[type=range]').value === '3'")
    page.click("#sv-generate")
    wait_for_tokens(page, 6)
    page.wait_for_function("document.querySelectorAll('.sv-panel-tokens .sv-sequence').length === 3")
    page.wait_for_function(
        "document.querySelector('.sv-panel-speed .sv-sentence').textContent.includes('3 sequences together')"
    )
    page.click("#sv-stop")
    assert wait_for_status(page, "stopped", "finished")
    assert page.evaluate(f"{RUN}.sequences") == 3
