"""The files of the page: its own scripts and styles, plotly.js from the installed wheel, the bundled recording."""

from __future__ import annotations

import gzip
import hashlib
import threading
from functools import cached_property
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

STATIC = Path(__file__).resolve().parent / "static"
RECORDINGS = Path(__file__).resolve().parent.parent / "assets" / "recordings"

#: What may be served, with its type: the system's own table of types is wrong for .js on some machines.
TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".woff2": "font/woff2",
}
NDJSON = "application/x-ndjson; charset=utf-8"
ALWAYS_ASK = "no-cache"
FOR_EVER = "public, max-age=31536000, immutable"


def respond(request: Request, body: bytes, media_type: str, cache: str, gzipped: bytes | None = None) -> Response:
    """`body` with an ETag, 304 when the browser has it, and gzipped when it takes that."""
    etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    headers = {"etag": etag, "cache-control": cache, "vary": "accept-encoding", "x-content-type-options": "nosniff"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        body = gzipped or gzip.compress(body, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(body, media_type=media_type, headers=headers)


class PlotlyScript:
    """plotly.js of the installed wheel, read and packed once: 4.8 MB, 1.5 MB gzipped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @cached_property
    def body(self) -> bytes:
        from plotly.offline import get_plotlyjs

        return get_plotlyjs().encode()

    @cached_property
    def digest(self) -> str:
        """A few hex digits of its contents, for the address: a new plotly gets a new one."""
        return hashlib.sha256(self.body).hexdigest()[:16]

    @cached_property
    def gzipped(self) -> bytes:
        return gzip.compress(self.body, mtime=0)

    async def endpoint(self, request: Request) -> Response:
        def build() -> Response:
            with self._lock:  # packing takes a moment, and the first page asks from several tabs
                return respond(request, self.body, TYPES[".js"], FOR_EVER, self.gzipped)

        return await run_in_threadpool(build)


class StaticFiles:
    """Files of one folder, and nothing outside it."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder.resolve()

    async def endpoint(self, request: Request) -> Response:
        try:
            path = (self._folder / request.path_params["path"]).resolve()
            served = path.is_relative_to(self._folder) and path.suffix in TYPES and path.is_file()
        except (ValueError, OSError):  # a null byte, a name that is too long
            served = False
        if not served:
            return PlainTextResponse("not found", 404)
        return respond(request, await run_in_threadpool(path.read_bytes), TYPES[path.suffix], ALWAYS_ASK)


class Recording:
    """The recorded run with which the page opens: the first by name of `*.ndjson.gz`."""

    def __init__(self, folder: Path = RECORDINGS) -> None:
        self._folder = folder

    async def endpoint(self, request: Request) -> Response:
        path = next(iter(sorted(self._folder.glob("*.ndjson.gz"))), None)
        if path is None:
            return PlainTextResponse("no recorded run is bundled", 404)
        packed = await run_in_threadpool(path.read_bytes)
        return respond(request, await run_in_threadpool(gzip.decompress, packed), NDJSON, ALWAYS_ASK, packed)
