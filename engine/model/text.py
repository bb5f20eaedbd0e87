"""Token ids to text while they stream, with stop strings that never leak."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.errors import ModelError, first_line

# A piece that ends in this is an unfinished multi-byte character: wait for the next token.
REPLACEMENT = "\ufffd"


def load_tokenizer(directory: Path, **options: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local checkpoint; `gguf_file` names the file that holds it, if one does. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"no tokenizer in {directory} ({first_line(error)}): fetch tokenizer.json too") from error


class TextStream:
    """The text of one growing token sequence, piece by piece.

    Each `push` decodes only the ids since the last complete piece, so a long text costs linear time.
    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: list[int], stop: tuple[str, ...] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        # A few ids of context: some tokenizers drop the first token's leading space.
        self._ids = list(context[-6:])
        self._start = 0
        self._read = len(self._ids)
        self._stop = stop
        self._held = ""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add one token: (text that became complete, whether a stop string ended it)."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return "", False
        self._start, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """What was held back, now that no more tokens come."""
        tail = self._decode(self._ids[self._start :])[len(self._decode(self._ids[self._start : self._read])) :]
        piece, _ = self._release(tail)
        piece += self._held
        self.text += self._held
        self._held = ""
        return piece

    def _release(self, piece: str) -> tuple[str, bool]:
        pending = self._held + piece
        found = [at for at in (pending.find(text) for text in self._stop) if at >= 0]
        if found:
            self._held = ""
            self.text += pending[: min(found)]
            return pending[: min(found)], True
        keep = max((_overlap(pending, text) for text in self._stop), default=0)
        cut = len(pending) - keep
        self._held = pending[cut:]
        self.text += pending[:cut]
        return pending[:cut], False

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
