"""Serves the browser side alone, with a recording in place of an engine: for looking at it while working on it.

python tests/page/serve.py [--recording tests/golden/draft4.ndjson] [--port 8000]
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import lru_cache
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specviz.whatif import answer  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TYPES = {".js": "text/javascript", ".css": "text/css", ".json": "application/json", ".html": "text/html"}


@lru_cache(maxsize=1)
def plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().encode()


def handler(recording: Path) -> type[SimpleHTTPRequestHandler]:
    """Answers with the paths that the real server has."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            static = (ROOT / "specviz" / "static" / path.removeprefix("/specviz/static/")).resolve()
            if path == "/":
                self.reply((HERE / "index.html").read_bytes(), "text/html")
            elif path == "/specviz/plotly.min.js":
                self.reply(plotly(), "text/javascript")
            elif path == "/specviz/recording.ndjson":
                self.reply(recording.read_bytes(), "application/x-ndjson")
            elif path.startswith("/specviz/whatif/"):
                status, found = answer(Path(path).name, dict(parse_qsl(urlsplit(self.path).query)))
                self.reply(json.dumps(found).encode(), "application/json", status)
            elif path.startswith("/specviz/static/") and static.is_file() and static.suffix in TYPES:
                self.reply(static.read_bytes(), TYPES[static.suffix])
            else:
                self.send_error(404)

        def reply(self, body: bytes, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", f"{kind}; charset=utf-8")
            self.send_header("cache-control", "no-cache")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, default=ROOT / "tests" / "golden" / "draft4.ndjson")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    ThreadingHTTPServer(("127.0.0.1", arguments.port), handler(arguments.recording)).serve_forever()
