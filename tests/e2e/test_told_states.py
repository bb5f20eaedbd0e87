"""What a visitor is told while others run, while a model loads, and when it fails; the engine computes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fake_engine import FakeLoader

from engine.config import GenerationConfig
from engine.errors import CheckpointError
from engine.serve.runs import RunSettings
from engine.serve.session import Session
from specviz.ui import build, launch_kwargs


class SlowLoader(FakeLoader):
    """Loads when it is allowed to."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.allowed = threading.Event()

    def __call__(self, config, progress, cancelled):
        progress("experts", 40 << 20, 100 << 20)
        self.allowed.wait(30)
        return super().__call__(config, progress, cancelled)


@pytest.fixture
def loader() -> SlowLoader:
    return SlowLoader(round_s=0.01)


@pytest.fixture
def session(loader) -> Iterator[Session]:
    session = Session(loader, max_waiting=2)
    yield session
    loader.allowed.set()
    session.close()


@pytest.fixture
def page(browser, session) -> Iterator:
    demo = build(session)
    demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_kwargs(session))
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"http://127.0.0.1:{demo.server_port}")
    page.wait_for_selector("#specviz-root .sv-badge")
    page.wait_for_selector("#sv-generate")
    yield page
    page.close()
    demo.close()


def phase(page, text: str) -> None:
    page.wait_for_function("text => document.querySelector('.sv-phase').textContent.includes(text)", arg=text)


def test_loading_tells_its_bytes_then_the_run_its_end(page, loader):
    page.click("#sv-generate")
    phase(page, "loading experts 40 % of 100 MiB")
    assert page.is_visible(".sv-progress") and page.evaluate("document.querySelector('.sv-progress').value") == 0.4
    loader.allowed.set()
    phase(page, "decoding")
    page.click("#sv-stop")
    phase(page, "stopped")


def test_a_queue_tells_the_place_and_a_full_one_says_so(page, loader, session):
    others = [session.start(RunSettings((f"{n}",), generation=GenerationConfig(max_new_tokens=4000))) for n in range(2)]
    page.click("#sv-generate")
    phase(page, "queued, 2 ahead")
    others[1].stop()
    loader.allowed.set()
    others[0].stop()
    phase(page, "decoding")
    page.click("#sv-stop")
    phase(page, "stopped")
    assert session.wait_idle(10)
    session.start(RunSettings(("a",), generation=GenerationConfig(max_new_tokens=4000)))
    while session.health()["engine"] != "running":
        page.wait_for_timeout(20)
    for _ in range(2):
        session.start(RunSettings(("b",)))
    page.wait_for_timeout(1500)  # the button takes no click before Gradio has heard that the last run is over
    page.click("#sv-generate")
    page.get_by_text("2 runs are waiting already: try again in a minute").first.wait_for()


def test_a_failure_says_what_to_do_and_the_next_run_works(page, loader):
    loader.allowed.set()
    loader.error = CheckpointError("shard 2 of <b>x</b> is cut off: download it again")
    page.click("#sv-generate")
    phase(page, "failed")
    assert page.inner_text(".sv-notice") == str(loader.error)
    loader.error = None
    page.wait_for_timeout(1500)  # as above
    page.click("#sv-generate")
    phase(page, "decoding")
    page.click("#sv-stop")
    phase(page, "stopped")
