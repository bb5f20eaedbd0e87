"""An engine server in this process, and a network between it and a client that can be cut or slowed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engine.config import EngineConfig
from engine.serve.server import EngineServer, Offer, run_server
from engine.serve.session import Session

TOKEN = "open sesame"


@contextmanager
def lent(session: Session, offer: Offer | None = None) -> Iterator[int]:
    """Serves the session's engine on loopback; the port."""
    server = EngineServer(session, TOKEN, offer or Offer(EngineConfig(model="their model")))
    loop, stop, port, up = asyncio.new_event_loop(), asyncio.Event(), [], threading.Event()

    def ready(number: int) -> None:
        port.append(number)
        up.set()

    thread = threading.Thread(
        target=loop.run_until_complete, args=(run_server(server, "127.0.0.1", 0, ready, stop),), daemon=True
    )
    thread.start()
    assert up.wait(10)
    try:
        yield port[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


class Wire:
    """Forwards a port. `cut()` breaks all connections, `down` refuses new ones, `bytes_per_s` slows what comes back."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        self.down = False
        self.bytes_per_s: float | None = None
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.down:
                    near.close()
                    continue
                self.connections += 1
                far = socket.socket()
                # Small buffers: what is under way is not to hide that the wire is slow.
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                far.connect(("127.0.0.1", self._target))
                self._open += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2048):
                if slow and self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self.cut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def wait_until(condition: Callable[[], Any], timeout: float = 10) -> None:
    """Sleep until the condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
