"""Reloads, broken connections, hidden tabs, watchers and forged tokens, in a real browser against the real engine."""

from __future__ import annotations

import json

from test_page import KNOBS, RUN, choose_slow_link, export, mode, wait_for_status, wait_for_tokens

#: Remembers the page's websockets, so that a test can break them.
SOCKETS = """
window.sockets = [];
const Native = window.WebSocket;
window.WebSocket = class extends Native { constructor(...a) { super(...a); window.sockets.push(this); } };
"""
TEXT = "document.querySelector('.sv-text').textContent"


def tokens_of_run(page, app) -> int:
    return json.loads(export(page, app, "summary"))["results"][0]["new_tokens"]


def test_a_reload_goes_on_with_the_run_and_its_controls(open_page, app):
    page = open_page(reloads=True)
    choose_slow_link(page)
    page.click("#sv-generate")
    wait_for_tokens(page, 5)
    run = page.evaluate("window.specviz.state.run")
    page.fill("#sv-slots input[type=number]", "7")
    page.wait_for_function(f"{KNOBS}.some(knob => knob.name === 'slots' && knob.new === 7)")
    page.reload()
    page.wait_for_function(f"window.specviz?.state.run === {run!r}")
    wait_for_tokens(page, 10)
    assert page.evaluate("window.specviz.state.metrics.lost") == 0 and mode(page) == "live"
    # The controls are the run's again, and stand where it has them.
    page.wait_for_function("document.querySelector('#sv-slots input[type=range]').value === '7'")
    page.focus("#sv-k input[type=range]")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"{KNOBS}.some(knob => knob.name === 'k')")
    page.click("#sv-stop")
    assert wait_for_status(page, "stopped", "finished") == "stopped"
    page.reload()  # nothing to go on with: the recording
    page.wait_for_function("document.querySelector('.sv-badge')?.dataset.mode === 'recording'")


def test_a_broken_connection_resumes_without_a_gap(open_page, app):
    page = open_page(script=SOCKETS)
    page.click("#sv-generate")
    wait_for_tokens(page, 5)
    page.evaluate("window.sockets.forEach((socket) => socket.close())")
    assert wait_for_status(page, "finished", "failed") == "finished"
    assert page.evaluate("window.sockets.length") >= 2
    count = tokens_of_run(page, app)
    wait_for_tokens(page, count)
    assert page.evaluate("window.specviz.state.metrics.lost") == 0
    assert page.evaluate("window.specviz.state.metrics.acceptance.emitted") == count


def test_a_tab_that_was_hidden_has_the_whole_run(open_page):
    page = open_page()
    hide = "hidden => { Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });"
    hide += " window.requestAnimationFrame = hidden ? () => 0 : window.originalFrame ?? window.requestAnimationFrame;"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate("() => { window.originalFrame = window.requestAnimationFrame; }")
    page.set_default_timeout(180_000)  # the first run of all compiles the kernels
    page.click("#sv-generate")
    page.wait_for_function("window.specviz.state.run && window.specviz.state.metrics.acceptance.emitted >= 1")
    page.evaluate(hide, True)
    page.wait_for_function(f"{RUN}.status === 'finished'", polling=100)
    page.evaluate(hide, False)
    wait_for_tokens(page, page.evaluate("window.specviz.state.metrics.acceptance.emitted"))


def test_others_watch_and_change_nothing(open_page, app):
    teacher = open_page()
    choose_slow_link(teacher)
    teacher.click("#sv-generate")
    wait_for_tokens(teacher, 2)
    teacher.click("#sv-share")
    teacher.wait_for_function("document.querySelector('.sv-notice').textContent.includes('?watch=')")
    link = teacher.inner_text(".sv-notice").split(": ", 1)[1]
    students = [open_page(url=link) for _ in range(2)]
    for student in students:
        student.wait_for_function(
            "specviz.state.run && document.querySelector('.sv-badge').dataset.mode === 'watching'"
        )
        wait_for_tokens(student, 3)
        assert not student.is_visible("#sv-generate") and not student.is_visible("#sv-stop")
        assert student.evaluate("specviz.state.run") == teacher.evaluate("specviz.state.run")
    # They may save what they see, though they have no run of their own.
    assert students[0].is_visible("#sv-downloads")
    saved = [json.loads(line) for line in export(students[0], app, "events").splitlines()]
    assert [event["seq"] for event in saved] == list(range(1, len(saved) + 1)) and saved[-1]["kind"] != "run_end"
    assert '"round"' in export(students[0], app, "trace")
    students[0].evaluate("specviz.stop(); specviz.set('k', 3)")
    students[0].wait_for_function("document.querySelector('.sv-notice').textContent.includes('you are watching')")
    students[1].close()  # leaving stops nobody
    seen = teacher.locator(".sv-text .sv-token").count()
    wait_for_tokens(teacher, seen + 3)
    assert teacher.evaluate(f"{RUN}.status") == "running" and not teacher.evaluate(f"{KNOBS}.length")
    teacher.click("#sv-stop")
    assert wait_for_status(teacher, "stopped") == wait_for_status(students[0], "stopped")
    # The next run is seen as well, without a new link.
    before = students[0].evaluate("specviz.state.run")
    teacher.click("#sv-generate")
    students[0].wait_for_function(f"specviz.state.run !== {before!r} && {RUN}.status === 'running'")
    teacher.click("#sv-stop")
    wait_for_status(students[0], "stopped")


def test_one_visitor_s_stop_and_reload_leave_the_other_s_run_alone(open_page, app):
    first, second = open_page(), open_page(reloads=True)
    first.fill("#sv-prompt textarea", "Tom had a red kite.")
    second.fill("#sv-prompt textarea", "The little frog was")
    choose_slow_link(first)
    first.click("#sv-generate")
    wait_for_tokens(first, 2)
    second.click("#sv-generate")
    # The second waits its turn, and is told so.
    second.wait_for_function("document.querySelector('.sv-phase').textContent === 'queued, 1 ahead'")
    second.reload()
    second.wait_for_function("document.querySelector('.sv-phase')?.textContent === 'queued, 1 ahead'")
    stolen = first.evaluate("sessionStorage.getItem('specviz')")
    forged = json.dumps({**json.loads(stolen), "token": json.loads(second.evaluate("sessionStorage.specviz"))["token"]})
    third = open_page(reloads=True)
    third.evaluate("text => sessionStorage.setItem('specviz', text)", forged)
    third.reload()
    third.wait_for_function("document.querySelector('.sv-badge')?.dataset.mode === 'recording'")
    second.click("#sv-stop")
    assert wait_for_status(second, "stopped") == "stopped"
    assert first.evaluate(f"{RUN}.status") == "running"
    first.click("#sv-stop")
    wait_for_status(first, "stopped")
    assert "frog" not in first.evaluate(TEXT) and third.evaluate("specviz.state.run") is None
