from __future__ import annotations

import gzip
import json

import pytest

from engine.errors import UsageError
from engine.serve.runs import RunSettings
from engine.serve.session import Session
from specviz import record
from specviz.assets import RECORDINGS
from specviz.trace import load_events


def test_a_run_is_recorded_without_the_folders_of_the_machine(tmp_path, loader, monkeypatch):
    monkeypatch.setattr(record, "Session", lambda **options: Session(loader, **options))
    path = tmp_path / "run.ndjson.gz"
    text = record.record(path, RunSettings(("Once",)))
    events = load_events(path)
    assert events[-1]["summary"][0]["text"] == text and events[-1]["status"] == "finished"
    line = json.dumps({"kind": "run_start", "config": {"model": str(tmp_path)}})
    assert json.loads(record.portable(line))["config"]["model"] == tmp_path.name
    line = json.dumps({"kind": "run_start", "config": {"model": "someone/some-moe"}})
    assert json.loads(record.portable(line))["config"]["model"] == "someone/some-moe"


def test_a_failed_run_is_not_recorded(tmp_path, loader, monkeypatch, capsys):
    loader.options["fail_at"] = 1
    monkeypatch.setattr(record, "Session", lambda **options: Session(loader, **options))
    with pytest.raises(UsageError, match="the disk went away"):
        record.record(tmp_path / "run.ndjson", RunSettings(("Once",)))
    assert record.main([str(tmp_path / "run.ndjson"), "--k", "lots"]) == 2
    assert "is out of range" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_bundled_recording_is_whole_and_names_its_hardware():
    (path,) = RECORDINGS.glob("*.ndjson.gz")
    events = load_events(path)
    start = next(event for event in events if event["kind"] == "run_start")
    assert start["machine"]["cpu"] and start["link"]["label"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["kind"] == "run_end" and events[-1]["status"] == "finished"
    tokens = [token["text"] for event in events if event["kind"] == "round" for token in event["tokens"]]
    assert "".join(tokens).startswith(events[-1]["summary"][0]["text"])
    assert b"/home/" not in gzip.decompress(path.read_bytes())
