"""What the simulator makes of policies, against closed forms."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.control.cached import CachedCosts, cached_iteration
from engine.control.hardware_profile import load_hardware
from engine.control.hierarchy import place, roof_points, turning_points
from engine.control.model_profile import load_model
from engine.control.operators import Work, Workload, attention_work, experts_work
from engine.control.placement import GIB, WORKSPACE, cache_slots, expert_hops, largest_batch, self_draft_bytes
from engine.control.policies import batch_that_fits, moe_speq, on_demand, streamed
from engine.control.routing import RecordedRouting, UniformRouting
from engine.control.streamed import StreamCosts, stream_iteration
from engine.errors import BudgetError, UsageError

RECORDING = Path(__file__).resolve().parents[2] / "assets" / "recordings" / "stories.ndjson.gz"
A30, MIXTRAL = load_hardware("a30"), load_model("mixtral-8x7b")
UNIFORM = UniformRouting(MIXTRAL.experts, MIXTRAL.top_k)


def stream(**costs) -> StreamCosts:
    common = {"layers": 6, "micro_batches": 2, "attention": 1.0, "experts": 1.0, "page": (("link", 1.0),)}
    return StreamCosts(**{**common, **costs})


def test_a_stream_that_waits_for_its_link_takes_what_the_link_takes():
    found = stream_iteration(stream(page=(("link", 4.0),)))
    assert found.seconds == pytest.approx(6 * 4)
    assert found.busy["link"] == pytest.approx(1)
    assert found.binding == "link" and "link" in found.reason


def test_pages_of_weights_take_as_long_as_the_whole():
    assert stream_iteration(stream(page=(("link", 1.0),), pages=4)).seconds == pytest.approx(6 * 4)


def test_two_hops_go_at_the_pace_of_the_slower():
    found = stream_iteration(stream(page=(("disk", 6.0), ("link", 4.0))))
    assert found.seconds == pytest.approx(6 * 6)
    assert found.busy == pytest.approx({"disk": 1, "link": 4 / 6, "gpu": 2 / 6, "cpu": 2 / 6})


def test_a_stream_on_the_cpu_ends_with_the_last_micro_batch_at_its_experts():
    """Attention of 6 layers x 2 micro-batches without a gap, then the experts of the last one, draft and others."""
    found = stream_iteration(stream(attention=3.0, experts=2.0, draft_gpu=4.0, draft_cpu=5.0, others=0.5))
    assert found.target == pytest.approx(12 * 3 + 2)
    assert found.draft == pytest.approx(5)
    assert found.seconds == pytest.approx(12 * 3 + 2 + 5 + 0.5)


def test_one_micro_batch_overlaps_nothing():
    found = stream_iteration(stream(micro_batches=1, attention=3.0, experts=2.0, shared=1.0, rest=0.25))
    assert found.seconds == pytest.approx(6 * (3 + 2 + 1) + 0.25)


def test_activations_pass_between_pages():
    """Else each would wait until a layer's weights have crossed the link."""
    slow = stream_iteration(stream(page=(("link", 4.0),), activations=0.125))
    assert slow.seconds == pytest.approx(6 * (4 + 2 * 0.125))  # the link is still all that counts
    assert slow.busy["link"] == pytest.approx(1)


def cached(**costs) -> CachedCosts:
    common = {"layers": 5, "shared": 1.0, "resident": 0.5, "expert": 0.25, "load": (("link", 3.0),), "asked": 0.0}
    return CachedCosts(**{**common, **costs})


@pytest.mark.parametrize("asked", [0.0, 1.0, 2.0, 2.5])
def test_demand_loads_are_waited_for(asked: float):
    """A layer routes, loads what it misses one after the other, and computes the last as it arrives."""
    found = cached_iteration(cached(asked=asked, rest=0.125))
    layer = 1 + 3 * asked + 0.25 if asked else 1.5
    assert found.seconds == pytest.approx(5 * layer + 0.125)
    assert (found.draft, found.target) == (0, pytest.approx(found.seconds))


def test_what_a_long_draft_foretells_costs_nothing_but_its_compute():
    found = cached_iteration(cached(passes=3, draft_layer=4.0, draft_rest=1.0, foretold=(1.0, 0.0, 0.0)))
    assert found.draft == pytest.approx(3 * (5 * 4 + 1))
    assert found.target == pytest.approx(5 * (1 + 0.5 + 0.25))


def test_what_a_short_draft_cannot_hide_is_waited_for():
    """Loads start when the first layer is drafted and never pause; the last layer computes its expert and ends."""
    found = cached_iteration(cached(passes=1, draft_layer=0.5, foretold=(2.0,)))
    assert found.seconds == pytest.approx(0.5 + 5 * 2 * 3 + 0.25)
    assert found.busy["link"] == pytest.approx(30 / found.seconds)


def test_uniform_routing_by_enumeration():
    routing = UniformRouting(4, 2)
    sets = list(itertools.combinations(range(4), 2))
    exact = sum(len({*a, *b, *c}) for a in sets for b in sets for c in sets) / len(sets) ** 3
    assert routing.distinct(3) == pytest.approx(exact)
    assert routing.distinct(1) == pytest.approx(2)
    assert (routing.missing(1, 1), routing.missing(1, 9)) == (1.5, 0)


@pytest.mark.parametrize("rows", [1, 5])
def test_uniform_misses_are_those_of_an_lru_on_random_routes(rows: int):
    draw = random.Random(0)
    tokens = [draw.sample(range(16), 2) for _ in range(8000)]
    assert RecordedRouting([tokens]).missing(rows, 6) == pytest.approx(UniformRouting(16, 2).missing(rows, 6), rel=0.03)


def test_recorded_routing_by_hand():
    routing = RecordedRouting([[[0, 1], [0, 2], [3, 1]], [[0, 1], [0, 1], [0, 1]]])
    assert routing.distinct(1) == 2
    assert routing.distinct(2) == pytest.approx((3 + 4 + 2 + 2) / 4)
    assert routing.distinct(3) == routing.distinct(99) == pytest.approx((4 + 2) / 2)
    assert routing.missing(1, 2) == pytest.approx((2 + 1 + 2 + 2 + 0 + 0) / 6)
    assert routing.missing(1, 4) == pytest.approx((2 + 1 + 1 + 2 + 0 + 0) / 6)
    assert routing.missing(2, 4) == pytest.approx((3 + 2) / 2)  # a third token fills no chunk
    assert routing.missing(3, 1) == pytest.approx((4 + 2) / 2)


def test_routing_of_a_recorded_run(tmp_path: Path):
    """The run that comes with the project: 8 layers, 2 of 16 experts, and more reuse than chance has."""
    path = tmp_path / "run.ndjson"
    path.write_bytes(gzip.decompress(RECORDING.read_bytes()))
    routing = RecordedRouting.from_trace(path)
    assert (routing.top_k, routing.distinct(1)) == (2, 2)
    uniform = UniformRouting(16, 2)
    assert 2 < routing.distinct(9) < uniform.distinct(9)
    assert routing.missing(1, 4) < uniform.missing(1, 4)
    assert routing.missing(9, 2) > routing.missing(9, 8) > 0


def test_traces_without_routing_are_refused(tmp_path: Path):
    path = tmp_path / "run.ndjson"
    for text in ("", "{", json.dumps({"kind": "round", "sequence": 0, "tokens": [{}]}), "[1]"):
        path.write_text(text)
        with pytest.raises(UsageError, match="--trace"):
            RecordedRouting.from_trace(path)
    with pytest.raises(UsageError, match="at least one"):
        RecordedRouting([])


def test_slots_are_what_memory_holds_beside_all_else():
    """Counted again from the configuration: an A100 with Phi-3.5-MoE, whose INT4 copy takes 19.3 GiB."""
    hardware, model = load_hardware("a100-40gb"), load_model("phi-3.5-moe")
    work = Workload(batch=1, k=4, prompt=1000, output=24)
    assert self_draft_bytes(model) / GIB == pytest.approx(19.3, abs=0.05)
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 16)
    fixed = 2 * (attention + 2 * 32064 * 4096) + WORKSPACE + 1024 * 32 * 2 * 1024 * 2
    for draft in (0.0, self_draft_bytes(model)):
        slots = int((40 * GIB - fixed - draft) / (32 * 3 * 4096 * 6400 * 2))
        assert cache_slots(hardware, model, work, draft) == slots
    with pytest.raises(BudgetError, match="GiB of fast memory are needed"):
        cache_slots(hardware, model, replace(work, prompt=400_000), 0.0)


def test_experts_that_host_memory_cannot_hold_come_from_disk():
    model = load_model("deepseek-v3")
    hops = dict(expert_hops(load_hardware("rtx4090"), model, 1e9))
    share = 1 - 64 * GIB / (58 * 256 * 3 * 7168 * 2048)
    assert hops == pytest.approx({"disk": share / 7, "link": 1 / 25})
    with pytest.raises(BudgetError, match="smaller batch"):
        expert_hops(A30, MIXTRAL, 1e9, host_used=200 * GIB)


def test_the_largest_batch_fits_and_one_more_does_not():
    work = Workload(batch=1, k=5, prompt=512, output=128)
    batch = batch_that_fits(A30, MIXTRAL, work)
    streamed(A30, MIXTRAL, replace(work, batch=batch), UNIFORM)
    with pytest.raises(BudgetError):
        streamed(A30, MIXTRAL, replace(work, batch=batch + 1), UNIFORM)
    with pytest.raises(BudgetError, match="no sequence"):
        largest_batch(A30, load_model("mixtral-8x22b"), 640)


def test_where_every_pass_needs_all_experts_speculation_is_worth_what_it_accepts():
    """Bytes a pass are constant, so while the link binds, a round costs as much as a token."""
    work = Workload(batch=16, k=4, acceptance=0.8)
    without = streamed(A30, MIXTRAL, replace(work, k=0), UNIFORM)
    gain = streamed(A30, MIXTRAL, work, UNIFORM).tokens_per_second / without.tokens_per_second
    assert gain == pytest.approx((1 - 0.8**5) / 0.2, rel=0.01)
    assert without.iteration.seconds == pytest.approx(32 * 8 * 3 * 4096 * 14336 * 2 / 25e9, rel=0.01)


def test_at_batch_one_speculation_saves_only_what_unions_save():
    """R(k, a) = N(k+1)/K over the tokens of a round: bytes a token against plain decoding, when all is missing."""
    hardware, model = load_hardware("a100-40gb"), load_model("phi-3.5-moe")
    routing, work = UniformRouting(16, 2), Workload(batch=1, k=4, acceptance=0.9)
    plain = on_demand(hardware, model, work, routing, slots=0)
    drafted = moe_speq(hardware, model, work, routing, slots=0)
    union = 16 * (1 - (14 / 16) ** 5) / 2
    tokens = (1 - 0.9**5) / 0.1
    assert plain.tokens_per_second / drafted.tokens_per_second == pytest.approx(union / tokens, rel=0.05)


@pytest.mark.parametrize("slots", [1, 4, 12])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_foretelling_never_costs_and_hides_at_most_the_draft(k: int, slots: int):
    hardware, model = load_hardware("a100-40gb"), load_model("deepseek-v2-lite")
    work, routing = Workload(batch=1, k=k), UniformRouting(64, 6)
    blind = moe_speq(hardware, model, work, routing, slots, foretold=0.0).iteration
    seeing = moe_speq(hardware, model, work, routing, slots).iteration
    computed = blind.seconds * (1 - blind.busy["link"])
    assert blind.seconds - computed - 1e-9 <= seeing.seconds <= blind.seconds


def test_with_everything_resident_only_compute_remains():
    found = on_demand(load_hardware("h200"), MIXTRAL, Workload(batch=1, prompt=1, output=1), UNIFORM)
    assert found.slots == 8
    assert found.iteration.seconds == pytest.approx((MIXTRAL.active - MIXTRAL.head_params) * 2 / 4800e9, rel=0.01)
    assert set(found.iteration.busy) == {"gpu"}


def test_a_point_runs_at_its_lowest_roof():
    """P_x = min(P, B·I, B_link·I_link), and the same as time."""
    work = Work(flops=4e12, moved=1e10)
    point = place(A30, "experts", "gpu", work, moved=2e10)
    assert (point.intensity, point.link_intensity) == (400, 200)
    assert point.tflops == pytest.approx(25 * 200 / 1e3)
    assert point.binds == "the link"
    assert work.flops / point.tflops / 1e12 == pytest.approx(2e10 / 25e9)
    assert place(A30, "experts", "gpu", work).binds == "arithmetic"
    assert place(A30, "attention", "cpu", Work(1e9, 1e9)).binds == "cpu memory"


def test_points_agree_with_the_times_that_the_simulator_uses():
    work = Workload(batch=64, k=3)
    points = {point.phase: point for point in roof_points(A30, MIXTRAL, work, UNIFORM)}
    attention = attention_work(MIXTRAL, work.rows, work.batch, work.context)
    seconds = attention.flops / points["verify attention"].tflops / 1e12
    assert seconds == pytest.approx(attention.on(A30.cpu))
    experts = experts_work(MIXTRAL, work.rows, UNIFORM.distinct(work.rows))
    assert experts.flops / points["experts"].tflops / 1e12 == pytest.approx(experts.moved / 25e9)
    assert points["verify attention"].intensity == pytest.approx(4 * 4)  # 4(k+1): 4 query heads share a key


def test_turning_points_are_where_the_limits_meet():
    """P1: CPU and link deliver the same; P2: the link and the GPU do (MoE-Lightning, section 3)."""
    found = turning_points(A30, cpu_intensity=4.0, gpu_intensity=100.0)
    assert A30.slow_gbps * found.move == pytest.approx(357 * 4)
    assert A30.slow_gbps * found.saturate == pytest.approx(933 * 100)
    assert turning_points(A30, 1e9, 1e9).saturate == pytest.approx(165e3 / 25)
    with pytest.raises(UsageError, match="no GPU"):
        turning_points(load_hardware("space-2core"), 1.0, 1.0)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"k": -1}, {"prompt": 0}, {"output": 0}, {"acceptance": 1.5}])
def test_workloads_are_checked(wrong: dict):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Workload(**wrong)
