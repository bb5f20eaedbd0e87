"""Files of prompts, and several texts on one terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from engine import events
from engine.cli import main
from engine.console import Console
from engine.errors import UsageError
from engine.requests import Request, read_requests


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_one_prompt_a_line(tmp_path):
    path = written(tmp_path / "prompts.txt", "Tom had", "", "  ", '{"prompt": "no"}', "café")
    assert read_requests(path) == [Request("Tom had"), Request('{"prompt": "no"}'), Request("café")]


def test_one_object_a_line(tmp_path):
    path = written(tmp_path / "prompts.jsonl", '{"prompt": "Tom\\nhad", "max_new_tokens": 3}', "", '{"prompt": "The"}')
    assert read_requests(path) == [Request("Tom\nhad", 3), Request("The")]


@pytest.mark.parametrize(
    "line",
    ['"text"', "{", "[1]", '{"text": "a"}', '{"prompt": 5}', '{"prompt": " "}', '{"prompt": "a", "seed": 1}',
     '{"prompt": "a", "max_new_tokens": 0}', '{"prompt": "a", "max_new_tokens": 1.5}',
     '{"prompt": "a", "max_new_tokens": true}'],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(line: str, tmp_path):
    path = written(tmp_path / "prompts.jsonl", '{"prompt": "a"}', line)
    with pytest.raises(UsageError, match="line 2 of .*prompts.jsonl: "):
        read_requests(path)


def said(sequence: int, text: str, finished: bool = False) -> events.Round:
    token = events.Token(1, text, "plain", 0, 1.0)
    return events.Round(0, 1, sequence, 0, 0, 0, 0, [token], [], 0, 0, 0, 0, 0, finished)


def test_texts_come_one_after_the_other():
    stream = io.StringIO()
    console = Console(stream, 3)
    steps = [
        (said(1, "b"), "[1] "),
        (said(0, "a"), "[1] a"),
        (said(2, "c", True), "[1] a"),
        (said(0, "A", True), "[1] aA\n[2] b"),
        (said(1, "B", True), "[1] aA\n[2] bB\n[3] c\n"),
    ]
    for event, shown in steps:
        console.show(event)
        assert stream.getvalue() == shown


def test_a_run_that_ends_early_leaves_nothing_unsaid():
    stream = io.StringIO()
    console = Console(stream, 2)
    console.show(said(1, "b"))
    console.show(events.RunEnd(0, "stopped", None, []))
    assert stream.getvalue() == "[1] \n[2] b\n"
    stream = io.StringIO()
    console = Console(stream, 1)
    console.show(said(0, "a", True))
    assert stream.getvalue() == "a\n", "one text stands alone"


def test_a_file_of_prompts_is_answered_in_its_order(tiny_model, tmp_path, capsys):
    path = written(tmp_path / "prompts.jsonl", '{"prompt": "Tom had", "max_new_tokens": 3}', '{"prompt": "Why"}')
    options = ["--model", str(tiny_model("mixtral").directory), "--max-new-tokens=5", "--batch=1"]
    assert main(["generate", *options, "--prompt-file", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [result["new_tokens"] for result in told["results"]] == [3, 5]
    assert (told["batch"]["sequences"], told["batch"]["new_tokens"]) == (2, 8)
    for prompt, result in zip(("Tom had", "Why"), told["results"], strict=True):
        tokens = f"--max-new-tokens={result['new_tokens']}"
        assert main(["generate", *options[:2], tokens, "--prompt", prompt, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["text"] == result["text"]
    assert main(["generate", *options, "--prompt-file", str(path)]) == 0
    out, err = capsys.readouterr()
    texts = [result["text"] for result in told["results"]]
    assert out == f"[1] {texts[0]}\n[2] {texts[1]}\n"
    assert "8 tokens of 2 prompts" in err
