"""Generated text on a terminal, and what is said about it in one line."""

from __future__ import annotations

from typing import Any, TextIO

from engine.events import Event, Round, RunEnd


class Console:
    """Writes texts to `stream` as they grow, one after the other however many grow at the same time.

    The first prompt whose text is not complete is shown live; what the others said meanwhile follows in its turn. Of
    several, each has its number in front.
    """

    def __init__(self, stream: TextIO, prompts: int) -> None:
        self._stream = stream
        self._waiting = [""] * prompts
        self._finished = [False] * prompts
        self._turn = 0
        self._head()

    def show(self, event: Event) -> None:
        """What a round emitted, and the end of the run."""
        if isinstance(event, Round):
            self._waiting[event.sequence] += "".join(token.text for token in event.tokens)
            self._finished[event.sequence] = event.finished
            self._write()
        elif isinstance(event, RunEnd):
            self._finished = [True] * len(self._finished)
            self._write()

    def _write(self) -> None:
        while self._turn < len(self._waiting):
            self._stream.write(self._waiting[self._turn])
            self._waiting[self._turn] = ""
            if not self._finished[self._turn]:
                break
            self._stream.write("\n")
            self._turn += 1
            self._head()
        self._stream.flush()

    def _head(self) -> None:
        if len(self._waiting) > 1 and self._turn < len(self._waiting):
            self._stream.write(f"[{self._turn + 1}] ")


def one_line_of(result: dict[str, Any]) -> str:
    """One sequence: speed first, then why."""
    parts = [f"{result['decode_tok_s']:.1f} tokens/s" if result["decode_tok_s"] else "no tokens"]
    parts.append(f"{result['new_tokens']} tokens in {result['rounds']} rounds ({result['finish_reason']})")
    return " · ".join(parts + _why(result))


def batch_line(batch: dict[str, Any], result: dict[str, Any]) -> str:
    """A batch, of which `result` is any sequence: the same."""
    parts = [f"{batch['decode_tok_s']:.1f} tokens/s" if batch["decode_tok_s"] else "no tokens"]
    parts.append(f"{batch['new_tokens']} tokens of {batch['sequences']} prompts in {batch['decode_s']:.1f} s")
    return " · ".join(parts + _why(result))


def _why(result: dict[str, Any]) -> list[str]:
    parts = []
    if result["acceptance_rate"] is not None:
        parts.append(f"{result['acceptance_rate']:.0%} of the draft accepted")
    requests = result["experts"]["requests"]
    if requests:
        parts.append(f"{(result['experts']['hits'] + result['experts']['late']) / requests:.0%} of experts foreseen")
    if result["overlap"] is not None:
        parts.append(f"{result['overlap']:.0%} of transfer time hidden")
    if result["draft_alarm"] is not None:
        parts.append(result["draft_alarm"])
    return parts
