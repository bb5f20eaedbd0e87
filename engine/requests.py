"""What is asked for: one prompt with its own limits, and files of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UsageError


@dataclass(frozen=True)
class Request:
    """A prompt. `max_new_tokens`: where to stop at the latest; None takes the run's limit."""

    prompt: str
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise UsageError("the prompt is empty: write at least one word")
        tokens = self.max_new_tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise UsageError(f"max_new_tokens {tokens!r} is not a whole number from 1 on")


def read_text(path: Path, what: str) -> str:
    """The text of a UTF-8 file. Raises UsageError that says what was to be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {what} from {path}: {reason}") from error


def read_requests(path: Path) -> list[Request]:
    """The requests of a file: one prompt a line, or one JSON object a line if its name ends in .jsonl.

    An object has `prompt` and may have `max_new_tokens`; a prompt of several lines needs one. Blank lines do not
    count. Raises UsageError.
    """
    lines = read_text(path, "the prompts").splitlines()
    parse = _parse if path.suffix == ".jsonl" else Request
    requests = [_at(path, number, parse, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise UsageError(f"{path} is empty: write at least one prompt")
    return requests


def _at(path: Path, number: int, parse: Any, line: str) -> Request:
    try:
        return parse(line)
    except UsageError as error:
        raise UsageError(f"line {number} of {path}: {error}") from error


def _parse(line: str) -> Request:
    try:
        fields = json.loads(line)
        return Request(**fields)
    except (json.JSONDecodeError, TypeError) as error:
        raise UsageError('it is not an object like {"prompt": "…", "max_new_tokens": 64}') from error
