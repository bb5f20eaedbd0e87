"""Opens the dashboard: `python app.py`, then the address that it prints."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path

# Before gradio is imported: the page must ask nothing of the outside.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from engine.config import EMBEDDED_MODEL  # noqa: E402
from engine.errors import EngineError  # noqa: E402
from engine.serve.client import find_engine  # noqa: E402
from engine.serve.session import Session  # noqa: E402
from specviz.spaces import check_hardware  # noqa: E402


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    on_spaces = "SPACE_ID" in os.environ
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="0.0.0.0" if on_spaces else "127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=os.environ.get("GRADIO_SERVER_PORT", "7860"))
    parser.add_argument("--model", default=str(EMBEDDED_MODEL), help="a directory or a Hugging Face id")
    parser.add_argument("--draft-model", metavar="MODEL", help="a small model that the page offers as a draft")
    parser.add_argument("--engine", metavar="ws://HOST:PORT", help="show the engine that `engine serve` lends there")
    parser.add_argument("--token", default=os.environ.get("SPECVIZ_TOKEN", ""), help="of that engine ($SPECVIZ_TOKEN)")
    parser.add_argument("--share", action="store_true", help="make a public link through Gradio's tunnel")
    parser.add_argument("--open", action="store_true", help="open a browser")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if Path(args.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing needs the hub
    from specviz.ui import build, launch_kwargs

    try:
        check_hardware(os.environ)
        model, load, traits = find_engine(args.engine, args.token, args.model)
        with closing(Session(load)) as session:
            where = {"server_name": args.host, "server_port": args.port, "share": args.share, "inbrowser": args.open}
            build(session, model, args.draft_model, traits).launch(**where, **launch_kwargs(session))
    except (EngineError, OSError) as error:
        taken = f"port {args.port} is in use: stop the other program or choose another --port"
        print(f"app.py: {taken if 'empty port' in str(error) else error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
