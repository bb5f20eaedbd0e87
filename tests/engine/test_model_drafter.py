"""A small model beside the target: whose vocabulary fits, what it reads again after a rejection, what it costs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import Recording, record
from tiny_models import PROMPTS, VOCAB, TinyModel, greedy, llama_config, mixtral_config, save_model

from engine import events
from engine.config import EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.errors import CheckpointError, ModelError
from engine.speculation.batch import Sequence
from engine.speculation.drafters.model import Reading

NEW_TOKENS = 32
BATCH = PROMPTS[:6]


@pytest.fixture
def generate() -> Callable[..., Recording]:
    """generate(target, draft, …) → a run of the batch."""

    def run(target: TinyModel, draft: Path, **options) -> Recording:
        engine = Engine.load(EngineConfig(model=str(target.directory), draft=f"model:{draft}"))
        try:
            return record(engine, list(BATCH), **{"max_new_tokens": NEW_TOKENS, "k": 4, **options})
        finally:
            engine.close()

    return run


@pytest.fixture(scope="module")
def expected(tiny_model) -> list[list[int]]:
    model = tiny_model("mixtral")
    return greedy(model.reference(), model.directory, BATCH, NEW_TOKENS)


@pytest.mark.parametrize("k", (1, 4, 16))
def test_a_draft_as_good_as_the_target_is_always_right(k: int, tiny_model, generate, expected):
    """The target's own checkpoint, as transformers runs it: one wrong row in the draft's KV would show."""
    model = tiny_model("mixtral")
    recording = generate(model, model.directory, k=k)
    assert recording.ids == expected
    assert recording.results[0]["acceptance_rate"] == 1.0
    assert recording.results[0]["draft_alarm"] is None


def test_its_cache_is_right_after_rejections(tiny_model, expected, tmp_path):
    """Nearly the target, and not asked in each third round: what it drafts is what it would say on its own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model("mixtral")
    near = model.reference()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        near.lm_head.weight += 0.05 * torch.randn(near.lm_head.weight.shape, generator=generator)
    near.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    tokenizer.save_pretrained(tmp_path)

    def on_event(event: events.Event) -> None:
        if isinstance(event, events.Round):
            knobs.set("k", 0 if event.round % 3 == 0 else 4)

    engine = Engine.load(EngineConfig(model=str(model.directory), draft=f"model:{tmp_path}"))
    try:
        knobs = engine.knobs(GenerationConfig(k=4))
        recording = record(engine, list(BATCH), knobs, on_event=on_event, max_new_tokens=NEW_TOKENS)
    finally:
        engine.close()
    assert recording.ids == expected
    assert {event.drafted for event in recording.of(events.Round)} >= {0, 4}
    assert 0.2 < recording.results[0]["acceptance_rate"] < 0.98
    alone = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for number, prompt in enumerate(BATCH):
        text = tokenizer(prompt)["input_ids"]
        for event in recording.of(events.Round):
            if event.sequence != number:
                continue
            guessed = [t.id for t in event.tokens[: event.accepted]] + [t.id for t in event.rejected]
            with torch.no_grad():
                said = alone.generate(torch.tensor([text]), do_sample=False, max_new_tokens=4, eos_token_id=None)
            assert guessed == said[0, len(text) : len(text) + event.drafted].tolist()
            text = text + [token.id for token in event.tokens]


def test_another_architecture(tiny_model, dense_model, generate, expected):
    recording = generate(tiny_model("mixtral"), dense_model.directory)
    assert recording.ids == expected
    assert all(event.drafted <= 4 for event in recording.of(events.Round))


def test_a_draft_that_was_not_asked_for_a_while_catches_up(tiny_model, expected):
    """k = 0 for most of the text, then 8: the draft reads what it missed, and is right again."""
    model = tiny_model("mixtral")
    engine = Engine.load(EngineConfig(model=str(model.directory), draft=f"model:{model.directory}"))
    try:
        knobs = engine.knobs(GenerationConfig(k=0))

        def on_event(event: events.Event) -> None:
            if isinstance(event, events.Round) and event.round == 22:
                knobs.set("k", 8)

        recording = record(engine, list(BATCH), knobs, on_event=on_event, max_new_tokens=NEW_TOKENS)
    finally:
        engine.close()
    assert recording.ids == expected
    assert recording.results[0]["acceptance_rate"] == 1.0
    assert max(event.accepted for event in recording.of(events.Round)) == 8


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(VOCAB, VOCAB + 20), (VOCAB + 20, VOCAB), (VOCAB + 7, 320)])
def test_padded_vocabularies(target_rows: int, draft_rows: int, tmp_path, generate):
    """More or fewer embeddings than tokens, in either; a random target does emit ids that have no token."""
    target = save_model(tmp_path / "target", mixtral_config(vocab_size=target_rows), seed=3)
    draft = save_model(tmp_path / "draft", llama_config(vocab_size=draft_rows))
    want = greedy(target.reference(), target.directory, BATCH, NEW_TOKENS)
    assert any(token >= VOCAB for ids in want for token in ids) == (target_rows > VOCAB)
    for temperature in (0.0, 1.0):
        recording = generate(target, draft.directory, temperature=temperature)
        assert temperature or recording.ids == want
        assert not any("bug" in (result["draft_alarm"] or "") for result in recording.results)


def test_a_context_that_is_too_short_ends_the_draft_not_the_text(tiny_model, generate, expected, tmp_path):
    model = tiny_model("mixtral")
    for file in model.directory.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 44}))
    recording = generate(model, tmp_path)
    assert recording.ids == expected
    drafted = [event.drafted for event in recording.of(events.Round) if event.sequence == 0]
    assert drafted[0] == 4 and drafted[-2:] == [0, 0]
    assert recording.results[0]["acceptance_rate"] == 1.0


def test_its_memory_is_charged(tiny_model, dense_model, generate):
    recording = generate(tiny_model("mixtral"), dense_model.directory, max_new_tokens=4)
    weights = sum(p.nbytes for p in dense_model.reference().parameters())
    start = recording.of(events.RunStart)[0]
    kv = start.memory["draft"] - weights
    # Two layers of keys and values for two heads of eight, as long as the target's own cache.
    assert kv % (2 * 2 * 2 * 8 * 4) == 0 and kv // (2 * 2 * 2 * 8 * 4) % len(BATCH) == 0 and kv > 0
    assert recording.results[0]["memory"] == start.memory


def copy_with_tokenizer(model: TinyModel, directory: Path, change: Callable[[dict], None]) -> Path:
    shutil.copytree(model.directory, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    return directory


def swap(tokenizer: dict) -> None:
    vocab = tokenizer["model"]["vocab"]
    one, two = (next(token for token, number in vocab.items() if number == n) for n in (40, 70))
    vocab[one], vocab[two] = vocab[two], vocab[one]


def add(tokenizer: dict) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"].append({"id": VOCAB, "content": "<|more|>", **flags})


@pytest.mark.parametrize(
    ("change", "told"), [(swap, "token 40 is"), (add, f"token {VOCAB} is '<|more|>' there and nothing")]
)
def test_another_vocabulary_is_refused(change, told, tiny_model, dense_model, tmp_path):
    draft = copy_with_tokenizer(dense_model, tmp_path / "draft", change)
    with pytest.raises(ModelError) as failure:
        Engine.load(EngineConfig(model=str(tiny_model("mixtral").directory), draft=f"model:{draft}"))
    assert told in str(failure.value) and "\n" not in str(failure.value)


def test_missing_weights_are_not_made_up(tiny_model, dense_model, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(dense_model.directory, tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"draft lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        Engine.load(EngineConfig(model=str(tiny_model("mixtral").directory), draft=f"model:{tmp_path / 'draft'}"))


def test_no_model_there(tiny_model):
    with pytest.raises(ModelError, match="no model at /nowhere"):
        Engine.load(EngineConfig(model=str(tiny_model("mixtral").directory), draft="model:/nowhere"))


@pytest.mark.parametrize(
    ("guesses", "became", "text"),
    [
        ((5, 6, 7), [5, 6, 7, 8, 9], 6),  # all right, then the last guess (never read) and the bonus token
        ((5, 6, 7), [5, 9], 4),
        ((5, 6, 7), [9], 3),
        ((5, 6, 7), [5, 9, 10, 11], 4),  # rounds without a draft came between
        ((), [5, 9], 3),
        ((5, 6, 7), [5], 3),  # cut short: the newest token is read again
    ],
)
def test_what_is_kept_of_its_guesses(guesses, became, text):
    sequence = Sequence(0, [1, 2, 3], 20, None, new_ids=list(became))  # type: ignore[arg-type]
    reading = Reading(3, guesses)
    reading.settle(sequence)
    assert reading == Reading(text, ())
