"""The app as a user starts it, and a headless Chromium that looks at it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_S = 120
GRADIO_WHEN_LEFT = ("AbortError: signal is aborted", "Unexpected error Connection errored out")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.e2e)


class App:
    """A running app.py."""

    def __init__(self, url: str) -> None:
        self.url = url

    def health(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/specviz/healthz", timeout=10) as answer:
            return json.load(answer)

    def wait_until(self, engine: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.health()["engine"] != engine:
            assert time.monotonic() < deadline, f"the engine did not become {engine}: {self.health()}"
            time.sleep(0.05)


@pytest.fixture(scope="session")
def app(tmp_path_factory) -> Iterator[App]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("app")
    # The worst that Spaces may set: a Node server in front would refuse the websocket.
    env = {**os.environ, "GRADIO_SSR_MODE": "true", "SPECVIZ_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "app.py", "--port", str(port)]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        app = App(f"http://127.0.0.1:{port}")
        try:
            _wait_for(app, process, folder / "log")
            yield app
            assert "Traceback" not in (folder / "log").read_text()
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(app: App, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"app.py ended: {log.read_text()}"
        try:
            app.health()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"app.py did not answer: {log.read_text()}")


@pytest.fixture
def open_page(browser, app) -> Iterator[Callable]:
    """Opens the app's page; at the end, no page may have asked another host for anything or logged an error."""
    contexts, foreign, errors = [], [], []

    def open_page(width=1440, height=900, script=None, url=None, reloads=False, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: foreign.append(request.url) if _is_foreign(request.url) else None)
        # Gradio itself complains of its own streams when a page that has some is left.
        own = GRADIO_WHEN_LEFT if reloads else ()
        page.on("console", lambda m: m.type == "error" and not m.text.startswith(own) and errors.append(m.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        if script:
            page.add_init_script(script)
        page.goto(url or app.url)
        page.wait_for_selector("#specviz-root .sv-badge")
        page.wait_for_selector("#sv-generate", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    app.wait_until("idle", 60)
    assert not foreign, f"requests to other hosts: {foreign}"
    assert not errors, f"errors in the console: {errors}"


def _is_foreign(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1"
