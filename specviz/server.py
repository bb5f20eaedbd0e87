"""The routes that live beside Gradio's own, on the same port: websocket, files, exports, health."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from engine.serve.session import Session
from specviz.assets import NDJSON, PlotlyScript, Recording, StaticFiles
from specviz.live import LiveSocket
from specviz.perfetto import trace_json
from specviz.spreadsheet import summary_csv
from specviz.trace import summary
from specviz.whatif import whatif_routes


def create_routes(
    session: Session,
    *,
    plotly: PlotlyScript | None = None,
    static: StaticFiles | None = None,
    recording: Recording | None = None,
) -> list[BaseRoute]:
    """Routes for `demo.launch(app_kwargs={"routes": …})`, all below `/specviz/`."""
    return [
        WebSocketRoute("/specviz/ws", LiveSocket(session).endpoint),
        Route("/specviz/healthz", health(session)),
        Route("/specviz/plotly.min.js", (plotly or PlotlyScript()).endpoint),
        Route("/specviz/recording.ndjson", (recording or Recording()).endpoint),
        Route("/specviz/export/{run}/{token}/{name}", Exports(session).endpoint),
        Route("/specviz/static/{path:path}", (static or StaticFiles()).endpoint),
        *whatif_routes(),
    ]


def health(session: Session) -> Callable[[Request], Response]:
    """Whether the server is up and what its engine does."""

    def endpoint(request: Request) -> Response:
        return JSONResponse(session.health(), headers={"cache-control": "no-store"})

    return endpoint


class Exports:
    """A run as a file to keep: trace.json, events.ndjson (`?from=SEQ` for a part), summary.json, summary.csv.

    The address holds the run's token or, for those who watch, the name of its room.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    async def endpoint(self, request: Request) -> Response:
        params = request.path_params
        registry = self._session.registry
        run, token = params["run"], params["token"]
        hub = registry.find(run, token) or registry.seen_from(token, run)
        if hub is None or params["name"] not in MAKERS:
            return PlainTextResponse("no such run: it may be too long ago", 404)
        start = request.query_params.get("from", "1")
        lines = await run_in_threadpool(hub.lines, int(start) if start.isdecimal() else 1)
        make, media_type = MAKERS[params["name"]]
        body = await run_in_threadpool(make, lines)
        headers = {
            "content-disposition": f'attachment; filename="specviz-{hub.id}-{params["name"]}"',
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",  # a model may write anything, a page of HTML too
        }
        return Response(body, media_type=media_type, headers=headers)


def _events(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _trace(lines: list[str]) -> str:
    return trace_json([json.loads(line) for line in lines])


def _summary(lines: list[str]) -> str:
    return json.dumps(summary([json.loads(line) for line in lines]), indent=2)


def _spreadsheet(lines: list[str]) -> str:
    return summary_csv(summary([json.loads(line) for line in lines]))


#: File name → what makes it of the event lines, and its type.
MAKERS: dict[str, tuple[Callable[[list[str]], str], str]] = {
    "trace.json": (_trace, "application/json"),
    "events.ndjson": (_events, NDJSON),
    "summary.json": (_summary, "application/json"),
    "summary.csv": (_spreadsheet, "text/csv; charset=utf-8"),
}
