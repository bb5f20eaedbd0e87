"""A run's events as a file, one JSON object a line."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TextIO

from engine.errors import UsageError
from engine.events import Event


class TraceFile:
    """An NDJSON file of events, complete or not there at all. None writes nothing.

    Raises UsageError for bad paths, and when the disk does not take it.
    """

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._count = 0

    def __enter__(self) -> TraceFile:
        if self._path is not None:
            if self._path.is_dir():
                raise UsageError(f"cannot write the trace to {self._path}: it is a directory")
            try:
                self._file = self._partial.open("w", encoding="utf-8")
            except OSError as error:
                raise self._refused(error) from error
        return self

    def write(self, event: Event) -> None:
        if self._file is None:
            return
        # Transfers report from the link's threads.
        with self._lock:
            self._count += 1
            try:
                self._file.write(json.dumps({"seq": self._count, **event.to_json()}, ensure_ascii=False) + "\n")
            except OSError as error:
                raise self._refused(error) from error

    def __exit__(self, failed, *details) -> None:
        if self._file is None or self._path is None:
            return
        try:
            self._file.close()
            if not failed:
                os.replace(self._partial, self._path)
        except OSError as error:
            if not failed:
                raise self._refused(error) from error
        finally:
            self._partial.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> UsageError:
        return UsageError(f"cannot write the trace to {self._path}: {error.strerror}")

    @property
    def _partial(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
