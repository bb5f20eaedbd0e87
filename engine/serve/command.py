"""The command `serve`: its options, and its life from start to Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from typing import Any

from engine.config import EMBEDDED_MODEL, MISSES, EngineConfig, LinkConfig, parse_kernels
from engine.errors import UsageError
from engine.serve.server import EngineServer, Offer, run_server
from engine.serve.session import Session

TOKEN_VARIABLE = "SPECVIZ_TOKEN"
#: A page that lost its connection looks for its run for a minute.
VIEWER_TTL_S = 75.0


def add_serve(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """The command's options."""
    about = (
        "Lend this machine's engine to a page on another: app.py --engine ws://HOST:PORT. What it says is not "
        "encrypted: bind it to 127.0.0.1 and reach it through an SSH tunnel, or put a TLS proxy in front of it."
    )
    serve = commands.add_parser("serve", help="run the engine for a page on another machine",
                                description=about, formatter_class=formatter)  # fmt: skip
    add = serve.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all of this machine's")
    add("--port", type=int, default=8765, metavar="N", help="0 takes any free one")
    add("--token", metavar="T", help=f"what pages must know (${TOKEN_VARIABLE}; made up and printed otherwise)")
    add("--model", default=str(EMBEDDED_MODEL), metavar="PATH_OR_ID", help="the model that is lent")
    add("--link", type=LinkConfig.parse, metavar="LINK", help="the slow tier; pages choose it otherwise")
    add("--device", default="auto", metavar="auto|cpu|cuda[:N]", help="what computes; CUDA needs --link host")
    add("--misses", choices=MISSES, default="auto", help="of a host link: fetch a missed expert or compute it there")
    add("--threads", type=int, metavar="N", help="CPU threads of torch")
    add("--kernels", type=parse_kernels, default="all", metavar="all|none|NAME,…", help="what the kernels compute")
    add("--no-pack", action="store_true", help="read byte ranges of the shards instead of the page-aligned pack")
    add("--debug", action="store_true", help="show the traceback of an error")
    serve.set_defaults(command=run_serve)


def run_serve(options: argparse.Namespace) -> int:
    """Serve until interrupted. Raises UsageError."""
    token = options.token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(12)
    config = EngineConfig(
        model=options.model, device=options.device, misses=options.misses, threads=options.threads,
        kernels=options.kernels, pack=not options.no_pack, link=options.link or LinkConfig(),
    )  # fmt: skip
    session = Session(viewer_ttl=VIEWER_TTL_S)
    server = EngineServer(session, token, Offer(config, options.link))

    def ready(port: int) -> None:
        address = f"ws://{options.host}:{port}"
        print(f"the engine is lent at {address} · python app.py --engine {address} --token {token}", flush=True)

    try:
        asyncio.run(_until_interrupted(server, options.host, options.port, ready))
    except OSError as error:
        raise UsageError(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}") from error
    finally:
        session.close()
    print("stopped", file=sys.stderr)
    return 0


async def _until_interrupted(server: EngineServer, host: str, port: int, ready: Any) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    await run_server(server, host, port, ready, stop)
