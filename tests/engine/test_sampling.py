"""Speculation is lossless: what is emitted is distributed as the target alone would have it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import TinyModel
from transformers import AutoTokenizer

from engine.config import EngineConfig, GenerationConfig
from engine.engine import Engine
from engine.speculation.drafters import SelfDrafter
from engine.speculation.sampling import SamplingParams, displayed, distribution, match, propose, sample, verify

VOCAB, DRAWS = 8, 200_000
PARAMS = {
    "plain": SamplingParams(1.0),
    "hot": SamplingParams(1.7),
    "cold": SamplingParams(0.4),
    "top-k": SamplingParams(1.0, top_k=3),
    "top-p": SamplingParams(1.0, top_p=0.7),
    "all": SamplingParams(0.8, top_k=5, top_p=0.8),
}


def numpy_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row, in float64, written from the definitions."""
    if params.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scaled = (logits - logits.max()) / params.temperature
    if params.top_k:
        allowed = set(np.argsort(-scaled, kind="stable")[: params.top_k].tolist())
        scaled = np.array([x if i in allowed else -np.inf for i, x in enumerate(scaled)])
    probs = np.exp(scaled) / np.exp(scaled).sum()
    kept, mass = np.zeros_like(probs), 0.0
    for token in np.argsort(-probs, kind="stable"):
        if mass >= params.top_p:
            break
        kept[token], mass = probs[token], mass + probs[token]
    return kept / kept.sum()


def variation(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Total variation between observed counts and probabilities, both of any one shape."""
    return 0.5 * float((counts / counts.sum() - probs).abs().sum())


class Chain:
    """A toy target and draft in which a token depends on the one before it; row VOCAB is the start."""

    def __init__(self, params: SamplingParams, distance: float = 1.0, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        target = 1.5 * torch.randn(VOCAB + 1, VOCAB, generator=random)
        self.p = distribution(target, params)
        self.q = distribution(target + distance * torch.randn(VOCAB + 1, VOCAB, generator=random), params)

    def play(self, draws: int, lengths: torch.Tensor, claimed: torch.Tensor | None = None, seed: int = 1):
        """Draft two tokens from q, verify them; `claimed` is the q that verification is told. → (verdict, tokens)."""
        random = torch.Generator().manual_seed(seed)
        start = torch.full((draws,), VOCAB)
        luck = torch.rand(5, draws, generator=random, dtype=torch.float64)
        first = sample(self.q[start], luck[0])
        second = sample(self.q[first], luck[1])
        told = self.q if claimed is None else claimed
        verdict = verify(
            self.p[torch.stack([start, first, second], 1)],
            told[torch.stack([start, first], 1)],
            torch.stack([first, second], 1),
            lengths,
            luck[2:].T,
        )
        emitted = torch.stack([first, second, torch.full((draws,), -1)], 1)
        return verdict, emitted.scatter(1, verdict.accepted[:, None], verdict.token[:, None])


@pytest.mark.parametrize("distance", (0.3, 3.0), ids=("close", "far"))
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_emitted_tokens_follow_the_target(params: SamplingParams, distance: float):
    chain = Chain(params, distance)
    verdict, tokens = chain.play(2 * DRAWS, torch.full((2 * DRAWS,), 2))
    first = torch.bincount(tokens[:, 0], minlength=VOCAB)
    assert variation(first, chain.p[VOCAB]) < 0.01
    assert not first[chain.p[VOCAB] == 0].any(), "a token that the target excludes was emitted"
    more = verdict.accepted >= 1
    pairs = torch.bincount(tokens[more, 0] * VOCAB + tokens[more, 1], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
    seen = pairs.sum(1, keepdim=True) / pairs.sum()
    assert variation(pairs, seen * chain.p[:VOCAB]) < 0.01
    assert not pairs[chain.p[:VOCAB] == 0].any()


def test_acceptance_is_the_overlap_of_the_two():
    """Leviathan et al., theorem 3.5: a draft token is accepted with probability Σ min(p, q)."""
    chain = Chain(PARAMS["plain"])
    verdict, _ = chain.play(DRAWS, torch.full((DRAWS,), 1))
    expected = float(torch.minimum(chain.p[VOCAB], chain.q[VOCAB]).sum())
    assert float(verdict.accepted.float().mean()) == pytest.approx(expected, abs=0.005)


def test_a_wrong_q_is_noticed():
    """The bound of the tests above has teeth: told another q than the draft's, the output is biased."""
    chain = Chain(PARAMS["plain"])
    _, tokens = chain.play(DRAWS, torch.full((DRAWS,), 2), claimed=torch.full_like(chain.q, 1 / VOCAB))
    assert variation(torch.bincount(tokens[:, 0], minlength=VOCAB), chain.p[VOCAB]) > 0.05


def test_sequences_of_one_batch_draft_different_lengths():
    chain = Chain(PARAMS["all"])
    lengths = torch.arange(3 * DRAWS) % 3
    verdict, tokens = chain.play(3 * DRAWS, lengths)
    assert bool((verdict.accepted <= lengths).all())
    for length in range(3):
        first = torch.bincount(tokens[lengths == length, 0], minlength=VOCAB)
        assert variation(first, chain.p[VOCAB]) < 0.01


@pytest.mark.parametrize("noise", (0.0, 1e-8))
def test_equal_distributions_accept_everything(noise: float):
    chain = Chain(PARAMS["plain"], distance=0.0)
    assert torch.equal(chain.p, chain.q)
    chain.q = chain.q + noise * torch.linspace(-1, 1, VOCAB)
    verdict, tokens = chain.play(DRAWS, torch.full((DRAWS,), 2))
    assert float((verdict.accepted == 2).float().mean()) >= (1.0 if noise == 0 else 1 - 1e-5)
    assert variation(torch.bincount(tokens[:, 0], minlength=VOCAB), chain.p[VOCAB]) < 0.01


def test_disjoint_supports_accept_nothing():
    chain = Chain(PARAMS["plain"])
    chain.p[:, VOCAB // 2 :] = 0
    chain.q[:, : VOCAB // 2] = 0
    chain.p, chain.q = (t / t.sum(-1, keepdim=True) for t in (chain.p, chain.q))
    verdict, tokens = chain.play(DRAWS, torch.full((DRAWS,), 2))
    assert not verdict.accepted.any()
    assert variation(torch.bincount(tokens[:, 0], minlength=VOCAB), chain.p[VOCAB]) < 0.01


def test_one_hot_is_the_greedy_match():
    chain = Chain(SamplingParams(0.0), distance=1.0, seed=3)
    verdict, tokens = chain.play(16, torch.full((16,), 2))
    best, token = chain.p.argmax(-1), VOCAB
    for position in range(int(verdict.accepted[0]) + 1):
        token = int(best[token])
        assert set(tokens[:, position].tolist()) == {token}
    agree = bool(best[VOCAB] == chain.q.argmax(-1)[VOCAB])
    assert bool((verdict.accepted > 0).all()) == agree


@pytest.mark.parametrize("k", (0, 1, 5))
def test_the_greedy_match_is_what_the_rule_says_of_one_hot_targets(k: int):
    """Whatever q was, and with a draft that is right for a while, for a sequence of any length."""
    random = torch.Generator().manual_seed(k)
    logits, batch = torch.randn(400, k + 1, VOCAB, generator=random), 400
    q = torch.randn(batch, k, VOCAB, generator=random).softmax(-1)
    guesses = torch.randint(0, VOCAB, (batch, k), generator=random)
    best = logits.argmax(-1)
    tokens = torch.where(torch.rand(batch, k, generator=random) < 0.7, best[:, :k], guesses)
    lengths = torch.randint(0, k + 1, (batch,), generator=random)
    luck = torch.rand(batch, k + 1, generator=random, dtype=torch.float64)
    said = verify(distribution(logits, SamplingParams()), q, tokens, lengths, luck)
    ours = match(best, tokens, lengths)
    assert torch.equal(ours.accepted, said.accepted) and torch.equal(ours.token, said.token)
    assert k == 0 or {0, k} <= set(ours.accepted.tolist())


def test_a_proposal_is_certain_or_sampled():
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(3))
    luck = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens, q, sure = propose(logits, SamplingParams(), luck)
    assert q is None and torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(sure, logits.softmax(-1).amax(-1))
    tokens, q, sure = propose(logits, PARAMS["all"], luck)
    assert torch.equal(q, distribution(logits, PARAMS["all"])) and torch.equal(tokens, sample(q, luck))
    assert torch.equal(sure, displayed(logits, PARAMS["all"])[torch.arange(50), tokens])


def test_no_draft_is_plain_sampling():
    chain = Chain(PARAMS["hot"])
    none = torch.zeros(DRAWS, 0)
    verdict = verify(
        chain.p[VOCAB].expand(DRAWS, 1, VOCAB),
        none[..., None].expand(DRAWS, 0, VOCAB),
        none.long(),
        torch.zeros(DRAWS, dtype=torch.long),
        torch.rand(DRAWS, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )
    assert not verdict.accepted.any()
    assert variation(torch.bincount(verdict.token, minlength=VOCAB), chain.p[VOCAB]) < 0.01


@settings(max_examples=200, deadline=None)
@given(
    # Multiples of 1/64: two that float32 cannot tell apart would be a tie for one and an order for the other.
    logits=st.lists(st.integers(-1920, 1920).map(lambda n: n / 64), min_size=2, max_size=12, unique=True),
    temperature=st.sampled_from((0.0, 1e-6, 0.3, 1.0, 2.0)),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
)
def test_distribution_matches_numpy(logits: list[float], temperature: float, top_k: int, top_p: float):
    params = SamplingParams(temperature, top_k, top_p)
    wide = np.array(logits)
    ordered = np.sort(numpy_distribution(wide, dataclasses.replace(params, top_p=1.0)))[::-1].cumsum()
    assume(top_p == 1 or np.abs(ordered - top_p).min() > 1e-5)  # float32 may fall on either side of the cut
    got = distribution(torch.tensor([logits], dtype=torch.float32), params)[0]
    np.testing.assert_allclose(got.numpy(), numpy_distribution(wide, params), atol=2e-6)
    assert float(got.sum()) == pytest.approx(1, abs=1e-5)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e30, -1e30, float("-inf"), 0.0]])
    for temperature in (0.0, 1e-6, 1.0, 10.0):
        for top_p in (1.0, 0.5):
            probs = distribution(logits, SamplingParams(temperature, top_p=top_p))
            assert torch.equal(probs, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert float(displayed(torch.tensor([[1.0, 0.0]]), SamplingParams(0.0))[0, 0]) == pytest.approx(0.7311, abs=1e-4)


# End to end.


def excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations Pearson's statistic is above its mean; rare tokens are pooled."""
    expected = counts.sum() * probs
    common = expected >= 10
    rare = expected[~common].sum()
    pairs = list(zip(counts[common], expected[common], strict=True))
    if rare >= 1:
        pairs.append((counts[~common].sum(), rare))
    freedom = len(pairs) - 1
    return (sum((n - e) ** 2 / e for n, e in pairs) - freedom) / (2 * freedom) ** 0.5


@pytest.fixture(scope="module")
def sampled(tiny_model) -> tuple[Engine, TinyModel]:
    """The draft is a coarse one, so that p and q differ."""
    model = tiny_model("qwen3_moe")
    engine = Engine.load(EngineConfig(model=str(model.directory), draft="self-int2"))
    yield engine, model
    engine.close()


OPTIONS = GenerationConfig(max_new_tokens=3, temperature=1.0, top_k=40, top_p=0.9, k=4)


def deviations(
    engine: Engine, model: TinyModel, text: str = "The sun", batches: tuple[int, ...] = (500, 500)
) -> tuple[float, float]:
    """Of 1,000 continuations of one prompt: how unlikely the first tokens are, and the second behind the commonest."""
    results = [
        result["token_ids"]
        for seed, count in enumerate(batches)
        for result in engine.generate([text] * count, dataclasses.replace(OPTIONS, seed=seed))
    ]
    prompt = AutoTokenizer.from_pretrained(model.directory)(text)["input_ids"]
    reference, params = model.reference(), SamplingParams(OPTIONS.temperature, OPTIONS.top_k, OPTIONS.top_p)

    def probabilities(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return numpy_distribution(reference(torch.tensor([ids])).logits[0, -1].double().numpy(), params)

    first = np.bincount([ids[0] for ids in results], minlength=300)
    common = int(first.argmax())
    second = np.bincount([ids[1] for ids in results if ids[0] == common and len(ids) > 1], minlength=300)
    return excess(first, probabilities(prompt)), excess(second, probabilities([*prompt, common]))


def test_generated_text_is_distributed_as_transformers_has_it(sampled):
    assert max(deviations(*sampled)) < 5


@pytest.mark.parametrize("draft", ("ngram", "model"))
def test_other_drafters_keep_the_distribution(draft: str, tiny_model, dense_model):
    """Each with a q of its own; the text repeats itself, so that there is something to look up."""
    model, text = tiny_model("qwen3_moe"), "The sun. The sun"
    kind = f"model:{dense_model.directory}" if draft == "model" else draft
    engine = Engine.load(EngineConfig(model=str(model.directory), draft=kind))
    try:
        assert engine.generate([text], OPTIONS)[0]["acceptance_rate"] is not None
        assert max(deviations(engine, model, text, batches=(700,))) < 5
    finally:
        engine.close()


def test_generating_with_a_wrong_q_would_be_noticed(sampled, monkeypatch):
    honest = SelfDrafter.draft

    def dishonest(self, *arguments):
        draft = honest(self, *arguments)
        flat = draft.probs.sqrt()
        return dataclasses.replace(draft, probs=flat / flat.sum(-1, keepdim=True))

    monkeypatch.setattr(SelfDrafter, "draft", dishonest)
    assert max(deviations(*sampled)) > 8


def test_a_seed_decides_the_text(sampled):
    engine, _ = sampled
    texts = [
        engine.generate(["The sun"], GenerationConfig(max_new_tokens=16, temperature=1.0, seed=seed, k=3))[0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
