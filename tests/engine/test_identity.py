"""Exactness, rule 1: in float32 at temperature 0 the engine's tokens are those of transformers on its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, PROMPTS, TinyModel, greedy
from transformers import AutoTokenizer, PreTrainedModel

from engine.config import DRAFTS, EMBEDDED_MODEL, CacheBudget, EngineConfig, GenerationConfig, LinkConfig
from engine.engine import Engine

EMBEDDED = TinyModel(EMBEDDED_MODEL, layers=8, experts=16, top_k=2)
MODELS = ("embedded", *CONFIGS)
NEW_TOKENS, NEW_TOKENS_FULL = 16, 24


@dataclass(frozen=True)
class Setting:
    """One point of the matrix. `cache` names a number of slots a layer."""

    link: str
    cache: str
    policy: str
    prefetch: str
    k: int | str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


VALUES = {
    "link": ("disk", "emulated:5:20"),
    "cache": ("1", "top-k", "25%", "100%"),
    "policy": ("lru", "lfu", "lookahead"),
    "prefetch": ("draft", "next-layer", "none"),
    "k": (0, 1, 4, 8, "auto"),
}
ALL = [Setting(*values) for values in itertools.product(*VALUES.values())]


def covering(strength: int) -> list[Setting]:
    """A few settings among which every combination of `strength` values of different columns appears."""

    def groups(setting: Setting) -> set[tuple]:
        pairs = [(name, getattr(setting, name)) for name in VALUES]
        return set(itertools.combinations(pairs, strength))

    left = set().union(*map(groups, ALL))
    chosen = []
    while left:
        chosen.append(max(ALL, key=lambda setting: len(groups(setting) & left)))
        left -= groups(chosen[-1])
    return sorted(chosen, key=str)


#: The issue's matrix: all but the prefetch sources, which take turns.
MATRIX = [
    Setting(link, cache, policy, VALUES["prefetch"][at % 3], k)
    for at, (link, cache, policy, k) in enumerate(
        itertools.product(VALUES["link"], VALUES["cache"], VALUES["policy"], VALUES["k"])
    )
]
PAIRS, TRIPLES = covering(2), covering(3)


@pytest.fixture(scope="module")
def saved(tiny_model) -> Callable[[str], TinyModel]:
    return lambda name: EMBEDDED if name == "embedded" else tiny_model(name)


@pytest.fixture(scope="module")
def expected(saved) -> Callable[..., list[list[int]]]:
    """expected(model name, tokens) → transformers' own output for every prompt, computed once."""
    known: dict[tuple[str, int], list[list[int]]] = {}

    def lookup(name: str, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
        if (name, new_tokens) not in known:
            model = saved(name)
            known[name, new_tokens] = greedy(model.reference(), model.directory, PROMPTS, new_tokens)
        return known[name, new_tokens]

    return lookup


@pytest.fixture(scope="module")
def engine_of(saved) -> Iterator[Callable[[str, str], Engine]]:
    """One engine for each (model, link); everything else moves by its knobs."""
    engines: dict[tuple[str, str], Engine] = {}

    def lookup(name: str, link: str) -> Engine:
        if (name, link) not in engines:
            config = EngineConfig(model=str(saved(name).directory), link=LinkConfig.parse(link))
            engines[name, link] = Engine.load(config)
        return engines[name, link]

    yield lookup
    for engine in engines.values():
        engine.close()


def run(engine: Engine, setting: Setting, model: TinyModel, prompts: tuple[str, ...], new_tokens: int) -> list[dict]:
    options = GenerationConfig(max_new_tokens=new_tokens, k=setting.k)
    knobs = engine.knobs(options)
    slots = {"1": 1, "top-k": model.top_k, "25%": model.experts // 4, "100%": model.experts}[setting.cache]
    for name, value in (("slots", slots), ("policy", setting.policy), ("prefetch", setting.prefetch)):
        knobs.set(name, value)
    results = engine.generate(list(prompts), options, knobs=knobs)
    # The knobs came into effect, so the run was of the setting that the test is named for.
    assert knobs.values["slots"] == engine.cache.slots_per_layer == slots
    assert (engine.policy, engine.prefetcher.source) == (setting.policy, setting.prefetch)
    return results


@torch.no_grad()
def divergence(model: PreTrainedModel, directory: Path, prompt: str, expected: list[int], got: list[int]) -> str:
    """Where two outputs part, and how close the target's two best tokens were there."""
    at = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), len(got))
    ids = AutoTokenizer.from_pretrained(directory)(prompt)["input_ids"] + expected[:at]
    best = model(torch.tensor([ids])).logits[0, -1].float().topk(2).values.tolist()
    return f"{prompt!r} parts at token {at}, margin {best[0] - best[1]:.2e}: {expected[at:][:4]} became {got[at:][:4]}"


def compare(model: TinyModel, prompts: tuple[str, ...], expected: list[list[int]], results: list[dict]) -> None:
    got = [result["token_ids"] for result in results]
    if got != expected:
        reference = model.reference()
        wrong = [
            divergence(reference, model.directory, *case)
            for case in zip(prompts, expected, got, strict=True)
            if case[1] != case[2]
        ]
        pytest.fail("\n".join(wrong))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_every_setting:
        if metafunc.config.getoption("full_identity"):
            cases = [(name, setting) for name in MODELS for setting in MATRIX]
        else:
            cases = [(name, s) for name in MODELS for s in (TRIPLES if name == "qwen3_moe" else PAIRS)]
        metafunc.parametrize("name, setting", cases, ids=lambda value: str(value))


def test_settings_cover_the_matrix():
    assert len(MATRIX) == 5 * 3 * 2 * 4
    for settings in (PAIRS, TRIPLES, MATRIX):
        for name, values in VALUES.items():
            assert {getattr(setting, name) for setting in settings} == set(values)
    for one, two in itertools.combinations(VALUES, 2):
        seen = {(getattr(setting, one), getattr(setting, two)) for setting in PAIRS}
        assert seen == set(itertools.product(VALUES[one], VALUES[two]))


def test_every_setting(name: str, setting: Setting, saved, expected, engine_of, request):
    """All prompts as one ragged batch; with --full-identity one after the other, and longer."""
    model, engine = saved(name), engine_of(name, setting.link)
    if not request.config.getoption("full_identity"):
        compare(model, PROMPTS, expected(name), run(engine, setting, model, PROMPTS, NEW_TOKENS))
        return
    results = [run(engine, setting, model, (prompt,), NEW_TOKENS_FULL)[0] for prompt in PROMPTS]
    compare(model, PROMPTS, expected(name, NEW_TOKENS_FULL), results)


@pytest.mark.parametrize("name", MODELS)
def test_batch_of_one(name: str, saved, expected, engine_of):
    """Each prompt alone, each with another of the settings that cover all pairs."""
    model, tokens = saved(name), NEW_TOKENS // 2
    for number, prompt in enumerate(PROMPTS):
        setting = PAIRS[number % len(PAIRS)]
        results = run(engine_of(name, setting.link), setting, model, (prompt,), tokens)
        compare(model, (prompt,), [expected(name)[number][:tokens]], results)


def meetings() -> list[tuple[str, Setting]]:
    """For every draft, settings in which it meets every policy and both kinds of link; the rest takes turns."""
    cases = []
    for number, draft in enumerate(DRAFTS):
        for at, policy in enumerate(VALUES["policy"]):
            turn = number + at
            link, cache = VALUES["link"][turn % 2], VALUES["cache"][turn % 4]
            prefetch, k = VALUES["prefetch"][(turn + number // 3) % 3], (1, 4, 8)[(at + number // 3) % 3]
            cases.append((draft, Setting(link, cache, policy, prefetch, k)))
    return cases


def test_every_draft_meets_every_policy_and_link():
    for name in ("policy", "link"):
        met = {(draft, getattr(setting, name)) for draft, setting in meetings()}
        assert met == set(itertools.product(DRAFTS, VALUES[name]))


@pytest.mark.parametrize(("draft", "setting"), meetings(), ids=lambda value: str(value))
def test_every_draft(draft: str, setting: Setting, saved, expected):
    """On the models in turn; the first policy's setting on the embedded one."""
    at = VALUES["policy"].index(setting.policy)
    name = ("embedded", "mixtral", "qwen3_moe")[at]
    model, prompts = saved(name), PROMPTS[:8] if at == 0 else PROMPTS
    link = LinkConfig.parse(setting.link)
    engine = Engine.load(EngineConfig(model=str(model.directory), draft=draft, link=link))
    try:
        results = run(engine, setting, model, prompts, NEW_TOKENS)
    finally:
        engine.close()
    compare(model, prompts, expected(name)[: len(prompts)], results)
    assert draft in ("ngram", "none") or results[0]["acceptance_rate"] is not None
    assert draft != "none" or results[0]["acceptance_rate"] is None


@pytest.mark.parametrize("pack", (True, False), ids=("pack", "no-pack"))
@pytest.mark.parametrize("fused", (False, True), ids=("per-expert", "fused"))
@pytest.mark.parametrize("shards", ("1GB", "30KB"), ids=("single", "sharded"))
@pytest.mark.parametrize("stored", (torch.float32, torch.bfloat16), ids=str)
def test_every_layout(stored: torch.dtype, shards: str, fused: bool, pack: bool, tiny_model):
    """Whatever the experts look like on disk; transformers reads the very same files."""
    model = tiny_model("qwen3_moe", fused=fused, max_shard_size=shards, dtype=stored)
    assert (len(list(model.directory.glob("*.safetensors"))) > 1) == (shards != "1GB")
    prompts = PROMPTS[:3]
    engine = Engine.load(EngineConfig(model=str(model.directory), cache=CacheBudget(slots=2), pack=pack))
    try:
        results = engine.generate(list(prompts), GenerationConfig(max_new_tokens=12, k=3))
    finally:
        engine.close()
    compare(model, prompts, greedy(model.reference(), model.directory, prompts, 12), results)
