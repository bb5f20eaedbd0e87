"""The stories as token windows: read, split, tokenize, cut."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
EOT = "<|endoftext|>"
EOT_ID = 0
IGNORE = -100  # the label that cross_entropy skips


@dataclass(frozen=True)
class Story:
    """One text. `whole` is false when the generator's length limit cut its end off."""

    text: str
    whole: bool = True


def read_real(path: Path = HERE / "real.txt.xz") -> list[Story]:
    """The TinyStories in file order. A single newline separates stories, a blank line paragraphs."""
    text = lzma.decompress(path.read_bytes()).decode()
    parts = (part.strip() for part in re.split(r"(?<!\n)\n(?!\n)", text))
    return [Story(part) for part in parts if len(part) > 100]  # shorter ones are stray lines, not stories


def read_synthetic(path: Path = HERE / "synthetic.txt.xz") -> list[Story]:
    """The generated stories; each is closed by a line that says whether it is whole."""
    text = lzma.decompress(path.read_bytes()).decode()
    pieces = re.split(r"\n<\|(endoftext|cut)\|>(?:\n|$)", text)
    return [Story(body.strip(), end == "endoftext") for body, end in zip(pieces[::2], pieces[1::2], strict=False)]


def split_real(stories: list[Story]) -> tuple[list[Story], list[Story]]:
    """(train, held out): the last twelfth by file order is held out, before anything is shuffled."""
    held = len(stories) // 12
    return stories[:-held], stories[-held:]


def train_tokenizer(stories: list[Story], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which every byte has a token, so that no text is unknown; token 0 is EOT."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((story.text for story in stories), trainer)
    return wrap_tokenizer(bpe)


def wrap_tokenizer(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers saves and loads it. Every text gets an EOT in front, as in training."""
    bpe.post_processor = processors.TemplateProcessing(single=f"{EOT} $A", special_tokens=[(EOT, EOT_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=EOT, eos_token=EOT, pad_token=EOT,
        model_max_length=1024, clean_up_tokenization_spaces=False,
    )  # fmt: skip


class Windows:
    """An endless supply of training batches, the same for the same seed, that can start anywhere.

    Each pass lays all stories end to end in a fresh order, every one behind an EOT, cuts the row in
    windows and shuffles those. A pass always has the same number of windows, so that batch number n
    is known without drawing the n - 1 before it: that is what makes resuming exact.
    """

    def __init__(
        self, stories: list[Story], tokenizer: PreTrainedTokenizerFast, window: int, batch: int, seed: int
    ) -> None:
        encoded = tokenizer([story.text for story in stories])["input_ids"]
        self.documents = [torch.tensor(ids, dtype=torch.int32) for ids in encoded]
        self.whole = [story.whole for story in stories]
        self.window, self.batch, self.seed = window, batch, seed
        self.tokens = sum(len(document) for document in self.documents)
        self.batches_per_pass = self.tokens // window // batch
        if not self.batches_per_pass:
            raise ValueError(f"{self.tokens} tokens do not fill one batch of {batch} windows of {window}")

    def from_batch(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (ids, labels), both (batch, window) int64, from batch `number` on, without end."""
        first_pass, skip = divmod(number, self.batches_per_pass)
        epoch = first_pass
        while True:
            ids, labels = self._lay_out(epoch)
            for rows in list(range(self.batches_per_pass))[skip:]:
                span = slice(rows * self.batch, (rows + 1) * self.batch)
                yield ids[span].long(), labels[span].long()
            epoch, skip = epoch + 1, 0

    def _lay_out(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        ids = torch.cat([self.documents[i] for i in order])
        labels = ids.clone()
        # The EOT that opens a story also teaches that the story before has ended: not so if that one was cut.
        starts = torch.tensor([len(self.documents[i]) for i in order]).cumsum(0)
        cut = starts[:-1][[not self.whole[i] for i in order[:-1]]]
        labels[cut] = IGNORE
        rows = torch.randperm(len(ids) // self.window, generator=generator)
        keep = len(rows) * self.window
        return ids[:keep].view(-1, self.window)[rows], labels[:keep].view(-1, self.window)[rows]


def held_out_ids(stories: list[Story], tokenizer: PreTrainedTokenizerFast, window: int) -> torch.Tensor:
    """The held-out stories as (rows, window) int64, in order, the ragged end dropped."""
    encoded = tokenizer([story.text for story in stories])["input_ids"]
    flat = torch.tensor([token for ids in encoded for token in ids])
    return flat[: len(flat) // window * window].view(-1, window)
