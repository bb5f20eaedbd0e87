"""Checkpoints on disk: where each tensor lies, what damage is noticed, and that loading reads no experts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_families import save_family
from tiny_models import CONFIGS, PROMPTS
from transformers import AutoModelForCausalLM

from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.errors import Cancelled, CheckpointError
from engine.model import checkpoint as checkpoints
from engine.model.checkpoint import Checkpoint, read_header
from engine.model.ffn import DOWN, gate_up_name
from engine.model.layout import ExpertRecord
from engine.model.skeleton import load_skeleton, survey


def stored(record: ExpertRecord) -> bytes:
    """What the record points at, read with nothing but open and seek."""
    parts = []
    for segment in record.segments:
        with segment.path.open("rb") as file:
            file.seek(segment.offset)
            parts.append(file.read(segment.nbytes))
    return b"".join(parts)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("fused", (False, True), ids=("per-expert", "fused"))
@pytest.mark.parametrize("name", CONFIGS)
def test_byte_ranges_are_the_experts_of_transformers(name: str, fused: bool, dtype: torch.dtype, tiny_model):
    model = tiny_model(name, fused=fused, dtype=dtype, max_shard_size="30KB")
    table = load_skeleton(model.directory, torch.float32).table
    assert (table.layers, table.experts, table.shape.dtype) == (model.layers, model.experts, dtype)
    modules = [m for m in model.reference().modules() if hasattr(m, "gate_up_proj") and hasattr(m, "down_proj")]
    assert len(modules) == table.layers
    for layer, module in enumerate(modules):
        for expert in range(table.experts):
            raw = torch.frombuffer(bytearray(stored(table.records[layer][expert])), dtype=dtype)
            gate_up, down = table.shape.views(raw)
            assert torch.equal(gate_up.float(), module.gate_up_proj[expert].data)
            assert torch.equal(down.float(), module.down_proj[expert].data)


def test_headers_say_what_safetensors_says(tiny_model):
    model = tiny_model("olmoe", max_shard_size="30KB")
    seen = 0
    for path in model.directory.glob("*.safetensors"):
        infos = {info.name: info for info in read_header(path)}
        with safe_open(path, framework="pt") as shard:
            assert set(infos) == set(shard.keys())
            for name, info in infos.items():
                tensor = shard.get_tensor(name)
                assert (info.shape, info.segment.nbytes) == (tuple(tensor.shape), tensor.numel() * 4)
                raw = path.read_bytes()[info.segment.offset :][: info.segment.nbytes]
                assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), tensor.flatten())
                seen += 1
    assert seen == len(Checkpoint.open(model.directory).tensors)


@pytest.fixture(scope="module")
def shard(tiny_model) -> bytes:
    return (tiny_model("olmoe").directory / "model.safetensors").read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_off_shard_is_always_noticed(data: st.DataObject, shard: bytes, tmp_path: Path):
    header = 8 + int.from_bytes(shard[:8], "little")
    length = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(shard) - 1)))
    path = tmp_path / "cut.safetensors"
    path.write_bytes(shard[:length])
    with pytest.raises(CheckpointError, match="cut off"):
        read_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_header_of_nonsense_is_a_clear_error(data: st.DataObject, shard: bytes, tmp_path: Path):
    """Any bytes changed anywhere in the header: a list of tensors inside the file, or CheckpointError."""
    header = 8 + int.from_bytes(shard[:8], "little")
    damaged = bytearray(shard)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.sampled_from(b'0159{}[]",:-eE\x00\xff'))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged)
    try:
        infos = read_header(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    for info in infos:
        assert 0 <= info.segment.offset <= info.segment.offset + info.segment.nbytes <= len(shard)


@pytest.mark.parametrize(
    "header", (b"[]", b"3", b"null", b'{"a": 3}', b'{"a": {}}', b'{"a": {"data_offsets": [4], "shape": []}}', b"\xff",
               b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
               b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"[" * 100_000)
)  # fmt: skip
def test_headers_that_are_json_of_another_kind(header: bytes, tmp_path: Path):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError):
        read_header(path)


def test_loading_reads_the_shared_weights_and_nothing_else(tiny_model, monkeypatch):
    model = tiny_model("olmoe")
    read: list[torch.Tensor] = []
    honest = Checkpoint.read

    def counted(self, names):
        assert not any(".experts." in name for name in names)
        for name, tensor in honest(self, names):
            read.append(tensor)
            yield name, tensor

    monkeypatch.setattr(checkpoints.Checkpoint, "read", counted)
    engine = Engine.load(EngineConfig(model=str(model.directory), draft="none", pack=False, cache=CacheBudget(slots=1)))
    try:
        assert sum(t.numel() * t.element_size() for t in read) == engine.loaded.skeleton.shared_bytes
        assert engine.cache.stats.bytes_loaded == 0 and engine.cache.resident() == [[], []]
        source, moved = engine.loaded.link.source, []
        honest_read = source.read

        def counted_read(layer, expert, offset, out):
            moved.append(out.numel())
            honest_read(layer, expert, offset, out)

        monkeypatch.setattr(source, "read", counted_read)
        engine.generate([PROMPTS[0]], GenerationConfig(max_new_tokens=4, k=0))
        assert sum(moved) == engine.cache.stats.bytes_loaded > 0
        expert_bytes = engine.loaded.source.table.shape.nbytes
        assert engine.cache.nbytes <= 2 * (expert_bytes + 4096)
    finally:
        engine.close()


def test_loading_can_be_cancelled_and_reports_its_progress(tiny_model, cache_directory):
    config = EngineConfig(model=str(tiny_model("mixtral", seed=9).directory))
    stages: list[tuple[str, int, int]] = []
    with pytest.raises(Cancelled):
        Engine.load(config, cancelled=lambda: True)
    calls = iter(range(10**6))
    with pytest.raises(Cancelled):
        Engine.load(config, cancelled=lambda: next(calls) > 40)
    Engine.load(config, progress=lambda *stage: stages.append(stage)).close()
    assert {stage for stage, _, _ in stages} >= {"shared weights", "quantizing the draft to INT4"}
    assert all(0 <= done <= total for _, done, total in stages)
    left = [path for path in cache_directory.rglob("*") if path.is_file()]
    assert {path.name for path in left} <= {"experts.pack", "experts.json", "libspecviz.so"}


def test_an_unreadable_shard_is_named(tiny_model, tmp_path):
    model = tiny_model("olmoe", max_shard_size="30KB")
    for path in model.directory.iterdir():
        os.link(path, tmp_path / path.name)
    victim = sorted(tmp_path.glob("*.safetensors"))[2]
    victim.unlink()
    victim.mkdir()
    with pytest.raises(CheckpointError, match=victim.name):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ("GptOssConfig", "NemotronHConfig"))
def test_byte_ranges_of_other_layouts(name: str, tmp_path: Path):
    """Transposed with biases, and without a gate, in several shards: what is left in the model is not in a record."""
    model = save_family(name, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    skeleton = load_skeleton(model.directory, torch.float32)
    table, reference = skeleton.table, dict(model.reference().named_modules())
    names = {id(module): name for name, module in skeleton.model.named_modules()}
    for layer, ours in enumerate(skeleton.experts_modules):
        module = reference[names[id(ours)]]
        for expert in range(table.experts):
            raw = torch.frombuffer(bytearray(stored(table.records[layer][expert])), dtype=torch.float32)
            for view, matrix in zip(table.shape.views(raw), (gate_up_name(ours), DOWN), strict=True):
                expected = module.get_parameter(matrix)[expert]
                assert torch.equal(view, expected.t() if ours.is_transposed else expected)
        if ours.has_bias:
            assert torch.equal(ours.gate_up_proj_bias, module.gate_up_proj_bias)
            assert torch.equal(ours.down_proj_bias, module.down_proj_bias)


@pytest.mark.parametrize(
    "name", ("DeepseekV3Config", "HunYuanMoEV1Config", "FlintConfig", "Lfm2MoeConfig", "GptOssConfig")
)
def test_shared_weights_in_bfloat16_are_those_of_transformers(name: str, tmp_path: Path):
    """Routers, their biases and sinks stay in float32 where transformers keeps them: rounding routes otherwise."""
    save_family(name, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    skeleton = load_skeleton(tmp_path, torch.bfloat16)
    here = {name: tensor for name, tensor in skeleton.model.state_dict().items() if not tensor.is_meta}
    assert len(expected) - len(here) == 2 * len(skeleton.experts_modules)
    for name, tensor in here.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert survey(tmp_path, torch.bfloat16)[1] == skeleton.shared_bytes
