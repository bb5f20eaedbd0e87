"""The page below a proxy's path, in an iframe, without cookies; and axe-core over the whole of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_engine import FakeLoader

from engine.serve.session import Session
from specviz.ui import build, launch_kwargs

PREFIX = "/lab/specviz"
FRAME = f'<!doctype html><title>frame</title><iframe id="f" src="{PREFIX}/" style="width:100%;border:0;height:500px">'


class Proxy:
    """Strips a path before it forwards, as JupyterHub and many an nginx do; serves a page with an iframe at /frame."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self.port = listening.result(10).sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, rest = head.split("\r\n", 1)
            method, path, version = line.split(" ")
            if path == "/frame":
                body = FRAME.encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n")
                writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            elif path.startswith(PREFIX):
                await self._forward(f"{method} {path.removeprefix(PREFIX) or '/'} {version}", rest, reader, writer)
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _forward(self, line: str, rest: str, reader, writer) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        if "upgrade: websocket" not in rest.lower():  # one request a connection
            kept = [h for h in rest.split("\r\n") if h and not h.lower().startswith("connection:")]
            rest = "\r\n".join([*kept, "connection: close", "", ""])
        far_writer.write(f"{line}\r\n{rest}".encode("latin-1"))

        async def pump(source, sink) -> None:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()

        up = asyncio.ensure_future(pump(reader, far_writer))
        try:
            await pump(far_reader, writer)
        finally:
            up.cancel()
            far_writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def address() -> Iterator[str]:
    """The page with an engine that computes nothing, below a path."""
    session = Session(FakeLoader(round_s=0.01))
    demo = build(session)
    demo.launch(
        server_name="127.0.0.1", server_port=None, root_path=PREFIX, prevent_thread_lock=True, quiet=True,
        **launch_kwargs(session),
    )  # fmt: skip
    proxy = Proxy(demo.server_port)
    yield f"http://127.0.0.1:{proxy.port}"
    proxy.close()
    demo.close()
    session.close()


def test_a_run_below_a_path_without_cookies_or_requests_elsewhere(browser, address):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("websocket", lambda socket: urls.append(socket.url))
    page.goto(f"{address}{PREFIX}/")
    page.click("#sv-generate")
    page.wait_for_function("window.specviz?.state.metrics.run.status === 'finished'", timeout=60_000)
    assert page.get_attribute(".sv-badge", "data-mode") == "live"
    outside = [
        u for u in urls if not u.startswith((f"{address}{PREFIX}/", f"{address.replace('http', 'ws')}{PREFIX}/"))
    ]
    assert [url for url in outside if not url.startswith(("data:", "blob:"))] == []
    assert page.context.cookies() == []
    page.close()


def test_in_an_iframe_that_follows_its_height_the_page_does_not_grow(browser, address):
    """Spaces gives the iframe the height that its page asks for; a page that asks for more each time never ends."""
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.goto(f"{address}/frame")
    inner = page.frame_locator("#f")
    inner.locator("#specviz-root .sv-badge").wait_for()
    inner.locator("#sv-generate").click()
    heights = []
    for _ in range(12):
        page.wait_for_timeout(200)
        height = (
            "f => { const h = f.contentDocument.documentElement.scrollHeight; f.style.height = `${h}px`; return h; }"
        )
        heights.append(page.locator("#f").evaluate(height))
    assert max(heights[6:]) - min(heights[6:]) <= 40, heights
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_the_whole_page(browser, address, scheme):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    page.goto(f"{address}{PREFIX}/?__theme={scheme}")
    page.wait_for_selector("#specviz-root .sv-badge")
    page.wait_for_selector("#sv-generate")
    page.wait_for_timeout(500)
    found = [
        f"{violation['id']}: {[node['target'] for node in violation['nodes'][:4]]}"
        for violation in Axe().run(page).response["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    page.close()
    assert found == []
