"""The decode suite: what its two tables hold, and the large random model. No speeds are asserted."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tiny_models import mixtral_config
from transformers import AutoModelForCausalLM

from engine.bench import decode, random_model
from engine.bench.decode import decode_suite, format_decode
from engine.bench.kernels_decode import ORDER, TRANSFORMERS, kernels_decode
from engine.bench.prompts import PROMPTS
from engine.bench.random_model import RANDOM_MODEL, random_config, save_random_model
from engine.config import KERNELS, EngineConfig, LinkConfig
from engine.engine import Engine
from engine.errors import BudgetError
from engine.kernels.native import Absent, native

DISK = namedtuple("DISK", "total used free")


@pytest.fixture(scope="module")
def model(tiny_model) -> str:
    return str(tiny_model("mixtral").directory)


@pytest.fixture(scope="module")
def report(model: str) -> dict:
    config = EngineConfig(model=model, dtype="bfloat16", link=LinkConfig("emulated", gbps=10.0), threads=1)
    return decode_suite(config, 5, 1, lambda line: None)


def test_the_order_names_every_kernel():
    assert sorted(ORDER) == sorted(KERNELS)


def test_both_tables_in_one_report(report: dict):
    assert json.loads(json.dumps(report)) == report
    assert (report["suite"], report["dtype"], report["prompts"]) == ("decode", "bfloat16", len(PROMPTS))
    assert [row["equal_memory"] for row in report["rows"]] == [True, True, True, False]
    first, *engines = report["kernel_rows"]
    assert (first["name"], first["ratio"], first["tokens_per_s"] > 0) == (TRANSFORMERS, 1.0, True)
    if isinstance(native(), Absent):
        assert [row["kernels"] for row in engines] == [[], []]
        return
    assert [(row["k"], row["kernels"]) for row in engines] == [
        *((0, list(ORDER[:n])) for n in range(4)),
        *((4, list(ORDER[:n])) for n in range(5)),
    ]  # fmt: skip


def test_ratios_follow_from_the_rates(report: dict):
    first, *engines = report["kernel_rows"]
    plain = {row["k"]: row for row in reversed(engines)}  # the first of each k: no kernels
    for row in engines:
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / first["tokens_per_s"])
        assert row["over_torch"] == pytest.approx(row["tokens_per_s"] / plain[row["k"]]["tokens_per_s"])
        assert row["tokens_per_round"] == 1 if row["k"] == 0 else row["tokens_per_round"] >= 1
    for row in report["rows"][1:]:
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / report["rows"][0]["tokens_per_s"])


def test_texts_are_the_same_for_every_k(report: dict):
    bars = {bar["name"]: bar for bar in report["bars"]}
    if isinstance(native(), Absent):
        pytest.skip("in bfloat16 only the kernels promise that")
    bar = bars["different outputs between k, kernels on"]
    assert (bar["value"], bar["bar"], bar["rule"], bar["holds"]) == (0, 0, "at most", True)
    assert not any("transformers" in name for name in bars)  # asked of large models only


def test_the_table_shows_every_contender_and_bar(report: dict):
    text = format_decode(report)
    for row in (*report["rows"], *report["kernel_rows"], *report["bars"]):
        assert row["name"] in text


def test_one_table_alone(model: str, monkeypatch):
    config = EngineConfig(model=model, kernels=("experts",))
    monkeypatch.setattr(decode, "_equal_memory", lambda *arguments: pytest.fail("nobody asked for this table"))
    alone = decode_suite(config, 2, 1, lambda line: None, tables=("kernels",))
    assert (alone["rows"], alone["link"]) == ([], None)
    text = format_decode(alone)
    assert "link" not in text and TRANSFORMERS in text


def test_without_kernels_torch_remains(model: str, monkeypatch):
    monkeypatch.setenv("SPECVIZ_KERNELS", "off")
    rows, bars = kernels_decode(EngineConfig(model=model), 2, 1, lambda line: None)
    assert [row["name"] for row in rows] == [TRANSFORMERS, "plain, torch", "speculation, k = 4, torch"]
    assert bars == []


def test_the_random_model_is_large_and_shaped_like_the_upcycled_one():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_config())
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert 2 * weights > 10**9
    assert weights == 49152 * 576 + 576 + 30 * (
        2 * 576 * 576 + 2 * 576 * 192 + 2 * 576 + 8 * 576 + 8 * 3 * 576 * 1536
    )  # embedding and last norm; then queries, output, keys, values, norms, router, experts


def test_a_random_model_runs(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(random_model, "SHARD", 20_000)
    directory = tmp_path / "models" / "tiny"
    save_random_model(directory, mixtral_config(vocab_size=5000))
    assert len(list(directory.glob("*.safetensors"))) > 1
    assert [path.name for path in directory.parent.iterdir()] == ["tiny"]
    engine = Engine.load(EngineConfig(model=str(directory), dtype="bfloat16"))
    try:
        first = engine.generate([PROMPTS[0]], decode.GenerationConfig(max_new_tokens=5))[0]
    finally:
        engine.close()
    assert first["new_tokens"] == 5
    again = tmp_path / "again"
    save_random_model(again, mixtral_config(vocab_size=5000))
    for shard in directory.glob("*.safetensors"):
        assert shard.read_bytes() == (again / shard.name).read_bytes()


def test_the_random_model_is_written_once(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SPECVIZ_CACHE", str(tmp_path))
    monkeypatch.setattr(random_model, "random_config", mixtral_config)
    said: list[str] = []
    directory = random_model.random_model(said.append)
    assert directory == tmp_path / "models" / RANDOM_MODEL and len(said) == 1
    assert random_model.random_model(said.append) == directory and len(said) == 1


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(10**12, 10**12, 10**5))
    with pytest.raises(BudgetError, match="0.0 GB free.*SPECVIZ_CACHE"):
        save_random_model(tmp_path / "models" / "tiny", mixtral_config())
    assert not list((tmp_path / "models").iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(random_model, "EMBEDDED_MODEL", tmp_path / "absent")
    with pytest.raises(BudgetError, match="cannot write"):
        save_random_model(tmp_path / "models" / "tiny", mixtral_config())
    assert not list((tmp_path / "models").iterdir())
