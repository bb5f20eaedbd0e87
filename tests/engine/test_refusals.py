"""What is refused is refused from headers and config alone: no weight is read before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_families import save_mxfp4
from tiny_models import PROMPTS, TinyModel, greedy, mixtral_config, save_model

from engine.config import CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.errors import CheckpointError, EngineError, ModelError
from engine.model.checkpoint import Checkpoint, resolve_directory
from engine.offload.source import ExpertSource


def without(name: str):
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        del tensors[name]
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return change


def setting(name: str, value: object):
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        config[name] = value
        (directory / "config.json").write_text(json.dumps(config))

    return change


def in_integers(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: t.byte() if ".experts." in name else t for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


DAMAGE = {
    "a shared weight is missing": (without("model.norm.weight"), CheckpointError, "lacks model.norm.weight: "),
    "an expert is missing": (
        without("model.layers.1.block_sparse_moe.experts.7.w2.weight"), CheckpointError, "weights of 1 of 12 experts",
    ),
    "another vocabulary": (setting("vocab_size", 400), CheckpointError, "has shape .300, 32., the config says .400"),
    "more experts than there are": (setting("num_local_experts", 13), CheckpointError, "weights of 1 of 13 experts"),
    "wider experts": (setting("intermediate_size", 25), CheckpointError, "wrong size on disk"),
    "experts in integers": (in_integers, ModelError, "stored as U8: use a checkpoint in F32, BF16, F16"),
    "an unknown kind of layer": (setting("layer_types", ["full_attention", "conv"]), ModelError, "conv, which keep"),
}  # fmt: skip


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda self, names: pytest.fail("shared weights were read"))
    monkeypatch.setattr(ExpertSource, "__init__", lambda *args, **kwargs: pytest.fail("experts were opened"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_weight_is_read_of_what_is_refused(damage: str, tmp_path: Path, nothing_is_read: None) -> None:
    change, error, message = DAMAGE[damage]
    model = save_model(tmp_path, mixtral_config())
    change(model.directory)
    with pytest.raises(error, match=message) as refusal:
        Engine.load(EngineConfig(model=str(tmp_path)))
    assert isinstance(refusal.value, EngineError) and "\n" not in str(refusal.value)


def test_mxfp4_without_a_pack_is_refused_at_once(tmp_path: Path, nothing_is_read: None) -> None:
    save_mxfp4(tmp_path)
    with pytest.raises(ModelError, match="run without --no-pack"):
        Engine.load(EngineConfig(model=str(tmp_path), pack=False))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyModel:
    """A model in the hub's own cache, as a download leaves it, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--somebody--tiny-mixtral"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    return save_model(repository / "snapshots" / revision, mixtral_config(), max_shard_size="30KB")


def test_a_hub_id_is_found_in_the_hubs_cache(hub: TinyModel) -> None:
    assert resolve_directory("somebody/tiny-mixtral").samefile(hub.directory)
    expected = greedy(hub.reference(), hub.directory, PROMPTS[:2], 8)
    engine = Engine.load(EngineConfig(model="somebody/tiny-mixtral", cache=CacheBudget(slots=2)))
    try:
        results = engine.generate(list(PROMPTS[:2]), GenerationConfig(max_new_tokens=8, k=4))
        assert [result["token_ids"] for result in results] == expected
    finally:
        engine.close()


def test_a_hub_id_that_is_nowhere_is_refused(hub: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch somebody/another from the hub .*give a local directory"):
        resolve_directory("somebody/another")
