"""The doctor: what it finds, also where there is little to find."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.cli import main
from engine.doctor import examine, format_doctor
from engine.kernels.native import Absent, native

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def doctor(capsys):
    """The doctor's JSON, as the command line prints it."""

    def run() -> dict:
        assert main(["doctor", "--json"]) == 0
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return json.loads(out)

    return run


def test_it_tells_the_machine_and_the_versions(doctor):
    told = doctor()
    assert set(told) == {"versions", "machine", "cuda", "kernels", "cache"}
    assert told["versions"]["python"] == platform.python_version()
    assert told["versions"]["torch"] == torch.__version__
    machine = told["machine"]
    assert 1 <= machine["usable_cores"] <= machine["cores"] == os.cpu_count()
    assert machine["torch_threads"] == torch.get_num_threads()
    assert 0 < machine["available_gib"] <= machine["memory_gib"] * 1.01
    assert told["cache"]["directory"] == os.environ["SPECVIZ_CACHE"]


def test_it_tells_the_kernels_in_use(doctor):
    found = native()
    if isinstance(found, Absent):
        pytest.skip(f"no compiled kernels: {found.reason}")
    kernels = doctor()["kernels"]
    assert kernels["variant"] == found.variant and kernels["reason"] is None
    assert kernels["supported"] == list(found.variants)
    # Best last; what this machine lacks was compiled all the same.
    assert [name for name in kernels["compiled"] if name in kernels["supported"]] == kernels["supported"]
    assert Path(kernels["library"]).is_file()
    assert kernels["variant"] in format_doctor(examine())


def test_a_forced_variant_is_the_one_in_use(doctor, monkeypatch):
    if isinstance(native(), Absent):
        pytest.skip("no compiled kernels")
    monkeypatch.setenv("SPECVIZ_KERNELS", "portable")
    kernels = doctor()["kernels"]
    assert (kernels["setting"], kernels["variant"]) == ("portable", "portable")
    monkeypatch.undo()
    native()


def test_absent_kernels_are_a_notice(doctor, monkeypatch, capsys):
    monkeypatch.setenv("SPECVIZ_KERNELS", "off")
    kernels = doctor()["kernels"]
    assert (kernels["variant"], kernels["supported"], kernels["library"]) == (None, [], None)
    assert kernels["reason"] == "switched off (SPECVIZ_KERNELS=off)"
    assert main(["doctor"]) == 0
    assert "torch computes instead" in capsys.readouterr().out


def test_a_compiler_that_fails_is_a_notice(tmp_path):
    environment = {**os.environ, "CXX": "/bin/false", "SPECVIZ_CACHE": str(tmp_path / "none")}
    environment.pop("SPECVIZ_KERNELS", None)
    command = [sys.executable, "-m", "engine", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kernels"]["variant"] is None and "/bin/false failed" in told["kernels"]["reason"]
    assert told["cache"]["used_bytes"] == 0 and told["cache"]["free_bytes"] > 0


def test_the_cache_is_measured(doctor, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECVIZ_KERNELS", "off")
    monkeypatch.setenv("SPECVIZ_CACHE", str(tmp_path))
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "experts.pack").write_bytes(bytes(12345))
    cache = doctor()["cache"]
    assert cache["used_bytes"] == 12345 and cache["exists"] and cache["writable"]
    monkeypatch.setenv("SPECVIZ_CACHE", str(tmp_path / "not" / "there"))
    cache = doctor()["cache"]
    assert (cache["used_bytes"], cache["exists"], cache["writable"]) == (0, False, True)


@pytest.mark.parametrize("name", ("qwen3_moe", "mixtral"))
@pytest.mark.parametrize(
    "options", ((), ("--dtype", "bfloat16", "--cache", "3", "--draft", "none"), ("--cache", "50%", "--draft", "sparse"))
)
def test_the_memory_of_a_model_is_what_its_engine_holds(name: str, options: tuple[str, ...], tiny_model, capsys):
    model = ["--model", str(tiny_model(name).directory), *options]
    assert main(["doctor", "--json", *model]) == 0
    told = json.loads(capsys.readouterr().out)["model"]
    assert main(["generate", "--json", "--prompt", "Hello", "--max-new-tokens", "2", *model]) == 0
    held = json.loads(capsys.readouterr().out)["memory"]
    assert {part: told["memory"][part] for part in ("shared", "draft", "cache")} == {
        part: held[part] for part in ("shared", "draft", "cache")
    }
    assert told["memory"]["total"] == held["total"] - held["kv"]
    assert main(["doctor", *model]) == 0
    assert f"{told['experts']} experts" in capsys.readouterr().out


def test_a_draft_model_is_charged(tiny_model, dense_model, capsys):
    """What transformers has in memory of it."""
    draft = f"model:{dense_model.directory}"
    assert main(["doctor", "--json", "--model", str(tiny_model("mixtral").directory), "--draft", draft]) == 0
    told = json.loads(capsys.readouterr().out)["model"]
    assert told["memory"]["draft"] == sum(p.nbytes for p in dense_model.reference().parameters())


def test_a_model_that_cannot_run_is_told(dense_model, capsys):
    assert main(["doctor", "--model", str(dense_model.directory)]) == 1
    assert "not a Mixture-of-Experts" in capsys.readouterr().err
