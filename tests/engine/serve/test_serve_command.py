"""`python -m engine serve` as a person starts it, with the real engine, against the same engine in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main
from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.serve.client import find_engine
from engine.serve.runs import RunSettings
from engine.serve.session import Session
from engine.serve.traits import Traits

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "Tom had a red kite."
GENERATION = GenerationConfig(max_new_tokens=24, k=3)
SETTINGS = EngineConfig(cache=CacheBudget(slots=4))


@pytest.fixture
def served():
    """(process, address) of a server with the included model."""
    command = [sys.executable, "-m", "engine", "serve", "--port", "0"]
    env = {**os.environ, "SPECVIZ_TOKEN": "hidden"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    address = re.search(r"ws://127\.0\.0\.1:\d+", line)
    assert address, line + process.stderr.read()
    yield process, address[0]
    process.kill()
    process.wait(10)


def test_the_text_is_what_the_engine_says_here_and_ctrl_c_ends_it(served):
    process, address = served
    model, load, traits = find_engine(address, "hidden", "unused")
    assert Path(model).is_dir() and traits == Traits.of(model) and traits.limits["slots"] == 16
    session = Session(load, viewer_ttl=600)  # nobody watches here, however slow the machine is
    try:
        run = session.start(RunSettings((PROMPT,), SETTINGS, GENERATION, {"k": 3, "slots": 4}))
        assert session.wait_idle(90)
    finally:
        session.close()
    end = run.hub.end
    assert end is not None and end.status == "finished", end
    engine = Engine.load(SETTINGS)
    try:
        (here,) = engine.generate([PROMPT], GENERATION)
    finally:
        engine.close()
    assert end.summary[0]["token_ids"] == here["token_ids"] and end.summary[0]["text"] == here["text"]
    kinds = {json.loads(line)["kind"] for line in run.hub.lines()}
    assert {"load", "run_start", "round", "transfer", "compute", "cache", "governor", "roofline"} <= kinds
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_a_port_that_is_taken_is_said_in_one_line(served, capsys):
    _, address = served
    assert main(["serve", "--port", address.rsplit(":", 1)[1], "--token", "t"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot listen on 127.0.0.1" in error
