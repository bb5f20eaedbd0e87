"""A Chromium, and the browser side served with a golden recording in place of an engine."""

from __future__ import annotations

import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def site():
    """`site(name)` serves a golden recording and returns the page's address."""
    sys.path.insert(0, str(Path(__file__).parent))
    from serve import handler

    servers = []

    def start(name: str) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler(GOLDEN / f"{name}.ndjson"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/"

    yield start
    sys.path.remove(str(Path(__file__).parent))
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def open_page(browser, site):
    """`open_page(name, width, at)` opens the page with a golden recording, paused at a share of its time.

    Fails the test on errors of the page, dialogs, and requests to anywhere else.
    """
    pages, troubles = [], []

    def start(name: str, width: int = 1300, at: float = 1.0, query: str = "", script: str = ""):
        address = site(name)
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        if script:
            page.add_init_script(script)
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("console", lambda m: m.type == "error" and troubles.append(f"console: {m.text}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(address) or troubles.append(f"left: {request.url}"))
        page.goto(address + query)
        page.wait_for_function("window.specviz?.state.replay && document.querySelector('.sv:not([hidden])')")
        page.evaluate("at => { const r = specviz.state.replay; r.pause(); r.seek(r.end * at); }", at)
        page.wait_for_function("specviz.state.figures?.seq === specviz.state.metrics.seq")
        return page

    yield start
    for page in pages:
        page.close()
    assert troubles == []
