"""The training recipe of the embedded model: corpus, optimizer, resuming and export."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

RECIPE = Path(__file__).resolve().parent.parent / "assets" / "training" / "stories"
TINY = {
    "vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 48, "head_dim": 16,
    "num_experts": 4, "moe_intermediate_size": 24,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _recipe_on_path():
    """The recipe is a folder of scripts, not a package: its files import each other by name."""
    names = ("corpus", "evaluate", "export", "model", "optimizer", "train")
    sys.path.insert(0, str(RECIPE))
    yield
    sys.path.remove(str(RECIPE))
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def stories():
    from corpus import read_real, read_synthetic

    return read_real(), read_synthetic()


@pytest.fixture(scope="module")
def tokenizer(stories):
    from corpus import train_tokenizer

    return train_tokenizer(stories[0][:60], TINY["vocab_size"])


def settings(out: Path, steps: int):
    from train import Settings

    return Settings(out=out, steps=steps, window=32, batch=4, report_every=10, threads=1, architecture=TINY)


def test_corpus_is_what_its_note_says(stories):
    real, synthetic = stories
    assert len(real) == 1060
    assert len(synthetic) == 13_727
    assert 0.3 < sum(not story.whole for story in synthetic) / len(synthetic) < 0.35
    assert not any("<|" in story.text for story in real + synthetic)


def test_held_out_stories_are_the_last_twelfth_of_the_file(stories):
    from corpus import split_real

    train, held = split_real(stories[0])
    assert train + held == stories[0]
    assert len(held) == 88
    assert not {story.text for story in held} & {story.text for story in train}


def test_tokenizer_round_trips_any_text(tokenizer):
    for text in ("Tom had a red kite.", "naïve 你好 🙂 \t\n", "\u202e${x}`<img>`"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == 0


def test_windows_cover_each_story_once_a_pass_and_can_start_anywhere(stories, tokenizer):
    from corpus import Windows

    windows = Windows(stories[0][:80], tokenizer, window=32, batch=4, seed=3)
    count = windows.batches_per_pass
    supply = windows.from_batch(0)
    batches = [next(supply) for _ in range(count + 3)]
    late = windows.from_batch(count + 1)
    for expected, got in zip(batches[count + 1 :], late, strict=False):
        assert torch.equal(expected[0], got[0])
        assert torch.equal(expected[1], got[1])
    assert not torch.equal(batches[0][0], batches[count][0])  # the next pass has another order

    seen = torch.cat([ids.flatten() for ids, _ in batches[:count]]).bincount(minlength=512)
    whole = torch.cat(windows.documents).long().bincount(minlength=512)
    assert (whole - seen).min() >= 0
    assert (whole - seen).sum() < 4 * 32 + 32  # at most one batch and one window do not fit


def test_the_end_of_a_cut_story_is_not_taught(tokenizer):
    from corpus import EOT_ID, IGNORE, Story, Windows

    text = "The little frog was happy. " * 3
    for whole in (True, False):
        windows = Windows([Story(text, whole)] * 20, tokenizer, window=16, batch=2, seed=0)
        ids, labels = windows._lay_out(0)
        openings = labels[(ids == EOT_ID)]
        # All but possibly the first story of the row open behind another one.
        assert (openings == (EOT_ID if whole else IGNORE)).sum() >= len(openings) - 1
        assert (labels[ids != EOT_ID] == ids[ids != EOT_ID]).all()


@pytest.mark.parametrize("shape", [(64, 24), (24, 64), (4, 48, 24)])
def test_orthogonalize_brings_singular_values_near_one(shape):
    from optimizer import orthogonalize

    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), steps=10))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_capacity_experts_equal_transformers_until_the_capacity_binds():
    from model import Trainee, capacity_experts, stories_config

    torch.manual_seed(0)
    experts = Trainee(stories_config(**TINY)).lm.model.layers[0].mlp.experts
    hidden = torch.randn(40, TINY["hidden_size"])
    weights, index = torch.randn(40, TINY["num_experts"]).softmax(-1).topk(2, -1)
    index[:30, 0], index[:30, 1] = 1, 2  # crowd two experts
    dense = experts(hidden, index, weights)
    torch.testing.assert_close(capacity_experts(experts, hidden, index, weights, float("inf")), dense)
    crowded = capacity_experts(experts, hidden, index, weights, 1.0)
    assert not torch.allclose(crowded, dense)
    places = 40 * 2 // TINY["num_experts"]
    torch.testing.assert_close(crowded[:places], dense[:places])  # first come, first served


def test_training_learns_resumes_exactly_and_exports(stories, tmp_path):
    from train import Run, train

    real, synthetic = stories[0][:96], stories[1][:40]
    lines: list[str] = []
    whole = train(settings(tmp_path / "a", 60), real, synthetic, False, lines.append)
    assert whole < 5.9  # ln 512 = 6.24 is a guess
    assert any("exported" in line for line in lines)

    half = settings(tmp_path / "b", 60)
    original = Run.step

    class Interrupted(Exception):
        pass

    def stop_halfway(run, ids, labels):
        if run.progress.step == 30:
            raise Interrupted
        return original(run, ids, labels)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Run, "step", stop_halfway)
        train(half, real, synthetic, False, lines.append)
    assert train(half, real, synthetic, True, lines.append) == pytest.approx(whole, abs=1e-5)


def test_export_refuses_a_model_that_transformers_computes_otherwise(tokenizer, tmp_path, monkeypatch):
    import export as exporting
    from model import Trainee, stories_config

    torch.manual_seed(0)
    model = Trainee(stories_config(**TINY))
    sample = torch.arange(32)[None]
    assert exporting.export(model, tokenizer, tmp_path, sample) < 1e-4
    monkeypatch.setattr("model.balance_loss", lambda logits, index: torch.zeros(()))
    monkeypatch.setattr("model.capacity_experts", lambda experts, hidden, *_: torch.zeros_like(hidden))
    with pytest.raises(RuntimeError, match="logits differ"):
        exporting.export(model, tokenizer, tmp_path, sample)


def test_settings_want_one_length():
    from train import Settings

    with pytest.raises(ValueError, match="either minutes or steps"):
        Settings(out=Path("x"))
    with pytest.raises(ValueError, match="either minutes or steps"):
        Settings(out=Path("x"), steps=1, minutes=1)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(list(range(100)), False), ([1, 2, 3, 4] * 10, True), (list(range(10)) * 2, False)]
)
def test_loops(tokens, expected):
    from evaluate import loops

    assert loops(tokens) is expected
