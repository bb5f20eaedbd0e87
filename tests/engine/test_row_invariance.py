"""Exactness, rule 3: with the kernels on, a row's logits do not depend on its neighbours, in any bit.

So verifying k+1 tokens is decoding them one at a time, and speculation is lossless in bfloat16 too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_families import WORKING, save_family
from tiny_models import CONFIGS, PROMPTS, save_model

from engine.config import EMBEDDED_MODEL, KERNELS, CacheBudget, EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.kernels.native import Native, native

MODELS = ("embedded", *CONFIGS, *WORKING)
# torch rounds the last elements of a tensor otherwise than those that fill its vectors (silu, sigmoid). In float32 it
# shows where a dense layer, a shared expert or a router's sigmoid has a width that is no multiple of 32, as the tiny
# models' do: rows then end in different places. These apply none of the two outside of their experts.
WITHOUT_TAILS = ("embedded", "mixtral", "olmoe", "PhimoeConfig", "GraniteMoeConfig", "FlexOlmoConfig")
SPLITS = ([40], [7, 7, 7, 7, 7, 5], [2, 3, 5, 9, 17, 4])


@pytest.fixture(autouse=True)
def kernels() -> None:
    if not isinstance(native(), Native):
        pytest.skip("the kernels are absent or switched off")


@contextmanager
def loaded(model: Path, dtype: str, **options) -> Iterator[Engine]:
    engine = Engine.load(EngineConfig(model=str(model), dtype=dtype, **options))
    try:
        assert engine.loaded.kernels == set(KERNELS)
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    def make(name: str) -> Path:
        if name == "embedded":
            return EMBEDDED_MODEL
        directory = tmp_path_factory.mktemp(name)
        if name in CONFIGS:
            return save_model(directory, CONFIGS[name]()).directory
        return save_family(name, directory).directory

    return make


def logits(engine: Engine, ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The target's logits for ids (1, tokens), so many rows a pass."""
    cache = engine.loaded.runner.new_cache(2, 128)
    out, at = [], 0
    for n in rows:
        engine.passes.begin("verify", [n])
        place = (torch.tensor([1]), torch.tensor([at]), torch.tensor([n]))
        out.append(engine.loaded.runner.forward(cache, engine.target_experts, ids[:, at : at + n], *place)[0])
        at += n
    return torch.cat(out)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in MODELS), *((name, "float32") for name in WITHOUT_TAILS)]
)
def test_a_pass_over_many_rows_gives_each_row_what_it_gets_alone(name, dtype, directory_of):
    ids = torch.randint(1, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    with loaded(directory_of(name), dtype, draft="none") as engine:
        alone = logits(engine, ids, [1] * 40)
        for split in SPLITS:
            assert torch.equal(logits(engine, ids, split), alone), split


@pytest.mark.parametrize("cache", ["100%", "25%"])
def test_bfloat16_text_is_the_same_for_every_draft_length_cache_and_batch(cache, request):
    full = request.config.getoption("--full-identity")
    prompts, tokens = (list(varied(200)), 50) if full else (list(PROMPTS[:6]), 24)
    with loaded(EMBEDDED_MODEL, "bfloat16", cache=CacheBudget.parse(cache)) as engine:
        expected = texts(engine, prompts, tokens, k=0, batch=1)
        assert not full or sum(map(len, expected)) >= 9_000
        for k, batch in itertools.product((0, 1, 4, 8, "auto"), (1, 5)):
            assert texts(engine, prompts, tokens, k=k, batch=batch) == expected, (k, batch)


@pytest.mark.parametrize("name", ["GptOssConfig", "AriaTextConfig", "NemotronHConfig", "MiniMaxM3VLTextConfig"])
def test_experts_that_the_kernels_do_not_know_whole_are_no_exception(name, directory_of):
    """Biased, clamped, without a gate: their products are the kernel's, one by one; their drafts are torch's."""
    with loaded(directory_of(name), "bfloat16", cache=CacheBudget(slots=2)) as engine:
        expected = texts(engine, list(PROMPTS[:5]), 16, k=0, batch=1)
        for k, batch in ((4, 1), (4, 5)):
            assert texts(engine, list(PROMPTS[:5]), 16, k=k, batch=batch) == expected, (k, batch)


def varied(count: int) -> Iterator[str]:
    """So many different prompts."""
    for number, prompt in zip(range(count), itertools.cycle(PROMPTS), strict=False):
        yield prompt if number < len(PROMPTS) else f"{prompt} {PROMPTS[number // len(PROMPTS) % len(PROMPTS)]}"


def texts(engine: Engine, prompts: list[str], tokens: int, *, k: int | str, batch: int) -> list[list[int]]:
    options = GenerationConfig(max_new_tokens=tokens, k=k)
    found: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        found += [result["token_ids"] for result in engine.generate(prompts[at : at + batch], options)]
    return found
