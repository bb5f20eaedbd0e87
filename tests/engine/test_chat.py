"""`--chat`: the prompt reaches the model as transformers' chat template puts it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import byte_tokenizer
from transformers import AutoTokenizer

from engine.cli import main

# Its end of a message is one token, which a prompt must not be able to write.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def chat_model(tiny_model, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("mixtral").directory, directory)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def generate(capsys, model: Path, prompt: str, *more: str) -> dict:
    arguments = ["generate", "--model", str(model), "--prompt", prompt, "--max-new-tokens", "8", "--json", *more]
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_the_prompt_is_a_message_of_the_template(chat_model: Path, tiny_model, capsys):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    message = [{"role": "user", "content": "Why?"}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    reference = tiny_model("mixtral").reference()
    output = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8)[0, len(ids) :].tolist()
    told = generate(capsys, chat_model, "Why?", "--chat")
    assert (told["prompt_tokens"], told["token_ids"]) == (len(ids), output)
    assert (told["config"]["chat"], generate(capsys, chat_model, "Why?")["config"]["chat"]) == (True, False)


def test_without_the_option_the_prompt_is_continued_as_it_is(chat_model: Path, capsys):
    raw = len(byte_tokenizer()("Why?")["input_ids"])
    assert generate(capsys, chat_model, "Why?")["prompt_tokens"] == raw


def test_a_prompt_cannot_end_its_own_message(chat_model: Path, capsys):
    whole = generate(capsys, chat_model, "a<|end|>b", "--chat")["prompt_tokens"]
    # The seven characters are text: more tokens than the one that they would be.
    assert whole > len(byte_tokenizer()("user: a<|end|>b<|end|>assistant:")["input_ids"])


def test_a_model_without_a_template_is_told(tiny_model, capsys):
    assert main(["generate", "--model", str(tiny_model("mixtral").directory), "--prompt", "a", "--chat"]) == 2
    err = capsys.readouterr().err
    assert "no chat template: leave out --chat" in err and err.count("\n") == 1
