"""Sparse upcycling: what the Mixtral computes, that it repeats, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny_gguf import save_gguf
from tiny_models import PROMPTS, TinyModel, byte_tokenizer, greedy, llama_config, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MixtralForCausalLM

from engine.cli import main
from engine.config import EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.errors import BudgetError, Cancelled, CheckpointError, EngineError, ModelError, UsageError
from engine.model.new_checkpoint import ShardWriter
from engine.upcycle.convert import upcycle
from engine.upcycle.recipe import Recipe

TEXT = " ".join(PROMPTS) * 3
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
DISK = namedtuple("DISK", "total used free")
RECIPE = Recipe(experts=4, top_k=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> TinyModel:
    """A dense Llama that can chat."""
    model = save_model(tmp_path_factory.mktemp("base") / "llama", llama_config(), dtype=torch.bfloat16)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model.directory)
    return model


@pytest.fixture(scope="module")
def sparse(base: TinyModel, tmp_path_factory) -> TinyModel:
    out = tmp_path_factory.mktemp("sparse") / "mixtral"
    upcycle(str(base.directory), out, TEXT, RECIPE)
    return TinyModel(out, 2, RECIPE.experts, RECIPE.top_k)


def load(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(torch.tensor([byte_tokenizer()(TEXT)["input_ids"][:100]])).logits


def same_logits(sparse: Path, dense) -> None:
    ours, theirs = logits(load(sparse)), logits(dense)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("top_k", (1, 2, 4))
def test_without_noise_it_computes_what_the_dense_model_does(top_k: int, base: TinyModel, tmp_path: Path):
    upcycle(str(base.directory), tmp_path / "out", TEXT, Recipe(4, top_k, noise=0))
    same_logits(tmp_path / "out", base.reference())


BASES = {
    "tied": llama_config(tie_word_embeddings=True),
    "rope": llama_config(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
        head_dim=16,
    ),
    "mistral": MistralConfig(**llama_config().to_diff_dict() | {"sliding_window": 16, "model_type": "mistral"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_every_setting_of_the_family_goes_along(name: str, tmp_path: Path):
    dense = save_model(tmp_path / "base", BASES[name], dtype=torch.bfloat16)
    upcycle(str(dense.directory), tmp_path / "out", TEXT, Recipe(4, 2, noise=0))
    same_logits(tmp_path / "out", dense.reference())


def test_a_gguf_file_gives_what_its_checkpoint_gives(base: TinyModel, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(base.directory)
    save_gguf(tmp_path / "tiny.gguf", base.reference(), tokenizer)
    upcycle(str(tmp_path / "tiny.gguf"), tmp_path / "out", TEXT, Recipe(4, 2, noise=0))
    same_logits(tmp_path / "out", base.reference())
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert theirs.chat_template == TEMPLATE


def test_the_ids_that_end_a_text_go_along(base: TinyModel, tmp_path: Path):
    """Also from settings that transformers reads but would not write: sampling without do_sample."""
    copy = tmp_path / "base"
    shutil.copytree(base.directory, copy)
    (copy / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [0, 7]}')
    upcycle(str(copy), tmp_path / "out", TEXT, RECIPE)
    assert load(tmp_path / "out").generation_config.eos_token_id == [0, 7]


def test_experts_are_noisy_copies_and_all_else_is_the_same(base: TinyModel, sparse: TinyModel):
    dense, mixtral = base.reference(), load(sparse.directory)
    assert isinstance(mixtral, MixtralForCausalLM)
    assert (mixtral.config.num_local_experts, mixtral.config.num_experts_per_tok) == (4, 2)
    kept = [name for name in dense.state_dict() if ".mlp." not in name]
    assert len(kept) == 3 + 2 * 6
    for name in kept:
        assert torch.equal(dense.state_dict()[name], mixtral.state_dict()[name]), name
    for ours, theirs in zip(mixtral.model.layers, dense.model.layers, strict=True):
        whole = torch.cat([theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight])
        experts, down = ours.mlp.experts, theirs.mlp.down_proj.weight
        for copies, original in ((experts.gate_up_proj, whole), (experts.down_proj, down)):
            noise = (copies - original) / original.std()
            assert noise.std(dim=(1, 2)).tolist() == pytest.approx([RECIPE.noise] * 4, rel=0.1)
            flat = noise.flatten(1)
            assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.15  # each expert has noise of its own


def test_the_engine_runs_it(sparse: TinyModel):
    prompts = PROMPTS[:2]
    engine = Engine.load(EngineConfig(model=str(sparse.directory)))
    try:
        results = [engine.generate([prompt], GenerationConfig(max_new_tokens=12))[0] for prompt in prompts]
    finally:
        engine.close()
    assert [r["token_ids"] for r in results] == greedy(sparse.reference(), sparse.directory, prompts, 12)


def weights(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.glob("*.safetensors"))]


def test_the_same_seed_gives_the_same_bytes(base: TinyModel, sparse: TinyModel, tmp_path: Path, monkeypatch):
    upcycle(str(base.directory), tmp_path / "again", TEXT, RECIPE)
    assert weights(tmp_path / "again") == weights(sparse.directory)
    upcycle(str(base.directory), tmp_path / "other", TEXT, Recipe(4, 2, seed=1))
    assert weights(tmp_path / "other") != weights(sparse.directory)


def test_the_report_says_what_was_made(base: TinyModel, tmp_path: Path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["upcycle", "--base", str(base.directory), "--experts", "4", "--text", str(text)]
    assert main([*command, "--out", str(tmp_path / "a"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    model = load(tmp_path / "a")
    assert report["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert report["bytes"] == index["metadata"]["total_size"] == 2 * report["parameters"]
    assert 0 < report["least_share"] < 1 / 4 < report["most_share"] < 1 / 2  # of top-2, none can get more than half
    assert main([*command, "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'b'}: 0 M weights")


STAGES = ("loading the base", "reading the text", "clustering", "writing the experts")


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_leaves_nothing(stage: str, base: TinyModel, tmp_path: Path):
    def interrupt(name: str, done: int, total: int) -> None:
        if name.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upcycle(str(base.directory), tmp_path / "out", TEXT, RECIPE, interrupt)
    assert not list(tmp_path.iterdir())


def test_it_can_be_cancelled_wherever_it_asks(base: TinyModel, tmp_path: Path):
    asked = 0

    def counting() -> bool:
        nonlocal asked
        asked += 1
        return False

    upcycle(str(base.directory), tmp_path / "whole", TEXT, RECIPE, cancelled=counting)
    assert asked > 20
    for last in (1, 3, asked // 2, asked):
        answers = iter([False] * (last - 1) + [True])
        with pytest.raises(Cancelled):
            upcycle(str(base.directory), tmp_path / "out", TEXT, RECIPE, cancelled=answers.__next__)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_an_interrupted_command_says_so(base: TinyModel, tmp_path: Path, capsys, monkeypatch):
    def interrupt(writer: ShardWriter) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "finish", interrupt)
    assert main(["upcycle", "--base", str(base.directory), "--out", str(tmp_path / "models" / "out")]) == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")
    assert not list((tmp_path / "models").iterdir())


def test_no_room(base: TinyModel, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(10**12, 10**12, 1000))
    with pytest.raises(BudgetError, match="0.0 GB free.*--out"):
        upcycle(str(base.directory), tmp_path / "out", TEXT, RECIPE)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(base: TinyModel, tmp_path: Path, monkeypatch):
    def full(tensors, path, metadata) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("engine.model.new_checkpoint.save_file", full)
    with pytest.raises(BudgetError, match="No space left"):
        upcycle(str(base.directory), tmp_path / "out", TEXT, RECIPE)
    assert not list(tmp_path.iterdir())


REFUSED = {
    "another activation": (lambda d: edit(d, hidden_act="gelu"), ModelError, "activation is gelu"),
    "biases": (lambda d: edit(d, attention_bias=True, mlp_bias=True), ModelError, "attention has biases, its MLP"),
    "another family": (lambda d: edit(d, model_type="qwen3"), ModelError, "a qwen3 model cannot"),
    "quantized": (lambda d: edit(d, quantization_config={"quant_method": "awq"}), ModelError, "quantized"),
    "no config": (lambda d: (d / "config.json").unlink(), ModelError, "config"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), ModelError, "tokenizer"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), CheckpointError, "lacks model.safetensors"),
    "more layers than weights": (lambda d: edit(d, num_hidden_layers=3), CheckpointError, "lacks model.layers.2"),
}


def edit(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("change, kind, reason", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_become_a_mixtral(
    change: Callable[[Path], None], kind: type[EngineError], reason: str, base: TinyModel, tmp_path: Path
):
    copy = tmp_path / "base"
    shutil.copytree(base.directory, copy)
    change(copy)
    with pytest.raises(kind, match=reason) as caught:
        upcycle(str(copy), tmp_path / "out", TEXT, RECIPE)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_mixture_of_experts_is_refused(tiny_model, tmp_path: Path):
    with pytest.raises(ModelError, match="a mixtral model cannot"):
        upcycle(str(tiny_model("mixtral").directory), tmp_path / "out", TEXT, RECIPE)


def test_gguf_files_that_cannot_be_read(tmp_path: Path, monkeypatch):
    path = tmp_path / "base.gguf"
    with pytest.raises(ModelError, match="No such file"):
        upcycle(str(path), tmp_path / "out", TEXT, RECIPE)
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        upcycle(str(path), tmp_path / "out", TEXT, RECIPE)
    path.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelError, match="cannot read the config"):
        upcycle(str(path), tmp_path / "out", TEXT, RECIPE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install gguf"):
        upcycle(str(path), tmp_path / "out", TEXT, RECIPE)


@pytest.mark.parametrize("text", ("Hello", "a" * 2000))
def test_a_text_that_says_too_little(text: str, base: TinyModel, tmp_path: Path):
    with pytest.raises(UsageError, match="too short for 4 experts"):
        upcycle(str(base.directory), tmp_path / "out", text, RECIPE)


WRONG = (
    ["--experts", "1"], ["--experts", "257"], ["--top-k", "0"], ["--top-k", "9"], ["--noise", "-1"],
    ["--noise", "nan"], ["--noise", "2"], ["--seed", "-1"], ["--text", "/nonexistent"], ["--out", "."],
)  # fmt: skip


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_wrong_usage_is_one_line(options: list[str], tmp_path: Path, capsys):
    arguments = ["upcycle", "--base", "/nonexistent", "--out", str(tmp_path / "out"), *options]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("error: ")
