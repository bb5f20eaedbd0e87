"""The tuner's fits against a machine of known formulas, its search against enumeration, its split of memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.bench.memory_split import split_memory
from engine.config import CacheBudget, EngineConfig
from engine.control.iteration import Iteration
from engine.control.routing import UniformRouting
from engine.errors import BudgetError, UsageError
from engine.tune.family import Shape
from engine.tune.fits import PowerCurve, Surface, fit_linear
from engine.tune.memory import MemoryLimit
from engine.tune.prediction import Prediction, Predictor
from engine.tune.probe import Probe
from engine.tune.search import finalists, search
from engine.tune.setting import Setting
from engine.tune.space import Fixed, probes, settings

LAYERS, EXPERTS, TOP_K, SLOTS = 6, 16, 2, 48
SHAPE = Shape(LAYERS, EXPERTS, TOP_K, "link")
UNIFORM = UniformRouting(EXPERTS, TOP_K)
LOAD = 0.004


def machine(setting: Setting) -> Probe:
    """A machine whose operators are linear, whose routing is uniform, and on which nothing overlaps.

    Without prefetch, an iteration is then the sum of everything: a closed formula that no simulator is needed for.
    """
    rows = setting.batch * (setting.k + 1)
    wanted = UNIFORM.distinct(rows)
    asked = UNIFORM.missing(rows, setting.slots // LAYERS)
    parts = {
        "pass_": 0.003 + 0.0005 * setting.batch if setting.k else 0.0,
        "shared": 0.006 + 0.0004 * rows,
        "experts": 0.0,  # so that there is nothing to hide a transfer behind
        "head": 0.001 + 0.0001 * rows,
        "overhead": 0.0005 + 0.00001 * rows,
    }
    stall = LAYERS * asked * LOAD
    seconds = sum(parts.values()) + stall + max(setting.k - 1, 0) * parts["pass_"]
    lengths = tuple((setting.k, setting.k) if i % 4 else (1, 0) for i in range(40)) if setting.k else ()
    return Probe(setting=setting, rounds=10, seconds=seconds, **parts, stall=stall, load=LOAD, wanted=wanted,
                 asked=asked, foreseen=0.0, tokens=setting.batch * (1 + setting.k), lengths=lengths)  # fmt: skip


def test_a_line_is_found_again_and_no_weight_is_negative():
    points = [(1.0, 2.0), (3.0, 5.0), (9.0, 8.0), (16.0, 15.0)]
    fit = fit_linear(points, [0.5 + 0.25 * a + 2.0 * b for a, b in points])
    assert fit.weights == pytest.approx((0.5, 0.25, 2.0))
    falling = fit_linear([(1.0,), (2.0,), (4.0,)], [4.0, 3.0, 1.0])
    assert min(falling.weights) >= 0
    assert falling.weights[1] == 0


def test_one_point_is_a_constant_not_an_error():
    assert fit_linear([(5.0,)], [2.0])(5.0) == pytest.approx(2.0)
    with pytest.raises(UsageError, match="at least one point"):
        fit_linear([], [])


def test_a_power_is_found_again_between_and_beyond_its_points():
    curve = PowerCurve(tuple((x, 3 * x**0.6) for x in (2.0, 5.0, 9.0)))
    for x in (1.0, 2.0, 3.3, 7.0, 17.0):
        assert curve(x) == pytest.approx(3 * x**0.6)


def test_a_surface_scales_to_other_batches_like_independent_routing():
    surface = Surface(UNIFORM, tuple((8, r, UNIFORM.distinct(8 * r)) for r in (1, 3, 9)))
    assert surface(4, 3) == pytest.approx(UNIFORM.distinct(12))
    assert surface(8, 9) == pytest.approx(UNIFORM.distinct(72))


def test_a_machine_of_known_formulas_is_predicted_where_it_was_not_probed():
    at = [(1, 2), (1, 8), (8, 2), (8, 8)]
    predict = Predictor(SHAPE, [machine(Setting("self-int4", k, b, "none", SLOTS)) for b, k in at])
    for batch, k in [(1, 3), (1, 5), (1, 10), (8, 4), (8, 6)]:
        setting = Setting("self-int4", k, batch, "none", SLOTS)
        assert predict(setting).seconds == pytest.approx(machine(setting).seconds, rel=0.04), setting
    larger = Setting("self-int4", 2, 1, "none", 72)
    assert predict(larger).seconds == pytest.approx(machine(larger).seconds, rel=0.02)


def test_prefetching_and_streaming_hide_no_more_than_there_is_to_hide_behind():
    plain = machine(Setting("sparse", 4, 4, "none", SLOTS))
    work = plain.seconds - plain.stall
    for source in ("draft", "stream"):
        ahead = replace(plain, setting=replace(plain.setting, prefetch=source), asked=0.0, foreseen=plain.asked)
        family = Predictor(SHAPE, [ahead]).families["sparse", source]
        seconds = family.simulate(ahead.setting)[0] / family.correction
        assert max(work, plain.stall) * 0.999 <= seconds <= plain.seconds * 1.001
        assert seconds < plain.seconds * 0.99


def test_tokens_follow_the_acceptance_that_was_seen():
    setting = Setting("sparse", 4, 3, "none", SLOTS)
    always = replace(machine(setting), lengths=((4, 4),) * 400)
    assert Predictor(SHAPE, [always]).tokens(setting) == pytest.approx(3 * 5, rel=0.05)
    never = replace(machine(setting), lengths=((1, 0),) * 400)
    assert Predictor(SHAPE, [never]).tokens(setting) == pytest.approx(3, rel=0.1)


def test_a_family_that_was_not_probed_is_not_guessed():
    predict = Predictor(SHAPE, [machine(Setting("sparse", 4, 4, "none", SLOTS))])
    other = Setting("sparse", 4, 4, "stream", SLOTS)
    assert not predict.knows(other)
    assert not predict.knows(Setting("sparse", 4, 8, "none", SLOTS))
    with pytest.raises(UsageError, match="nothing like"):
        predict(other)


@pytest.fixture(scope="module")
def memory(tiny_model) -> MemoryLimit:
    config = EngineConfig(model=str(tiny_model("mixtral").directory))
    return MemoryLimit(config, CacheBudget(share=0.7), kv_bytes_per_token=100, tokens=100)


def synthetic(setting: Setting) -> Prediction:
    """Best at k = 6, batch 8, with the draft "sparse"."""
    rate = 100 - (setting.k - 6) ** 2 - (math.log2(setting.batch) - 3) ** 2 + 5 * (setting.draft == "sparse")
    return Prediction(setting, 1.0, rate, Iteration(1.0, 1.0, 0.0, {"cpu": 1.0}))


@pytest.mark.parametrize(
    "fixed",
    [Fixed(), Fixed(k=3), Fixed(draft="sparse-1"), Fixed(batch=2), Fixed(prefetch="none"), Fixed(k=0),
     Fixed("sparse", 5, 4, "stream")],
)  # fmt: skip
def test_the_search_finds_the_best_of_what_is_not_fixed(memory, fixed):
    allowed = list(settings(fixed, memory))
    for setting in allowed:
        for name in ("draft", "k", "batch", "prefetch"):
            assert getattr(fixed, name) in (None, getattr(setting, name))
        assert memory.draft_bytes(setting.draft) + setting.slots * memory.slot_bytes + memory.kv_bytes(
            setting.batch
        ) <= max(memory.limit, 0)
    ranked = search(allowed, synthetic, lambda setting: True)
    assert ranked[0].rate == max(synthetic(setting).rate for setting in allowed)
    if fixed == Fixed():
        assert (ranked[0].setting.draft, ranked[0].setting.k, ranked[0].setting.batch) == ("sparse", 6, 8)
    last = finalists(ranked, 3)
    assert last[0] is ranked[0]
    assert len({(p.setting.draft, p.setting.prefetch, p.setting.batch) for p in last}) == len(last)
    chosen = probes(fixed, memory)
    assert {replace(s, slots=0) for s in chosen} <= {replace(s, slots=0) for s in allowed}
    assert len({(s.draft, s.slots) for s in chosen}) == len({s.draft for s in chosen})
    assert {setting.draft for setting in probes(fixed, memory)} == {setting.draft for setting in allowed}


def test_the_split_is_the_benches_own(memory, tiny_model):
    config = EngineConfig(model=str(tiny_model("mixtral").directory))
    without_kv = MemoryLimit(config, CacheBudget(share=0.7), 0, 0)
    for draft in ("none", "self-int4", "sparse"):
        assert abs(without_kv.slots(draft, 1) - split_memory(config, draft, 0.7).slots) <= 1
    assert memory.slots("none", 8) < memory.slots("none", 1)


def test_what_does_not_fit_says_what_would(tiny_model):
    config = EngineConfig(model=str(tiny_model("mixtral").directory))
    small = MemoryLimit(config, CacheBudget(nbytes=4096), 100, 100)
    with pytest.raises(BudgetError, match=r"--memory (\d+)MiB") as refused:
        list(settings(Fixed(batch=2), small))
    told = int(str(refused.value).split("--memory ")[1].split("MiB")[0])
    assert list(settings(Fixed(batch=2), small.limited(told << 20)))
