"""The suites that compare policies: what they hold, what they leave untouched, and Belady's bound. No speeds."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.bench import ablations, policies
from engine.bench.ablations import BOUND, EVICTION, ablations_suite, format_ablations
from engine.bench.belady import RequestLog, belady_loads
from engine.bench.contenders import Contender, contender_row, measure, measure_all
from engine.bench.memory_split import split_memory
from engine.bench.policies import OURS, TRANSFORMERS, format_policies, policies_suite
from engine.bench.prompts import PROMPTS
from engine.bench.transformers_decode import Outcome, expert_map, run_disk_offload, run_transformers
from engine.bench.wrong_ways import corrupted_predictions, separate_kv
from engine.cli import main
from engine.config import CacheBudget, EngineConfig, GenerationConfig, LinkConfig
from engine.engine import Engine
from engine.offload.slots import slot_nbytes

FAST = LinkConfig("emulated", gbps=50.0)


@pytest.fixture(scope="module")
def model(tiny_model) -> str:
    return str(tiny_model("mixtral").directory)


@pytest.fixture(scope="module")
def report(model: str) -> dict:
    return policies_suite(EngineConfig(model=model, link=FAST, threads=1), 4, 1, lambda line: None)


@pytest.fixture(scope="module")
def ablated(model: str) -> dict:
    config = EngineConfig(model=model, link=FAST, threads=1, cache=CacheBudget(slots=4))
    return ablations_suite(config, 6, 1, lambda line: None)


def bars(report: dict) -> dict[str, dict]:
    return {bar["name"]: bar for bar in report["bars"]}


def test_the_policies_report(report: dict) -> None:
    assert json.loads(json.dumps(report)) == report
    names = [row["name"] for row in report["rows"]]
    assert [name[:3] for name in names] == ["(a)", "(b)", "(c)", "(d)", "spe", "(e)"]
    by_name = {row["name"]: row for row in report["rows"]}
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / report["rows"][0]["tokens_per_s"])
        shares = [row[name] for name in ("hit_rate", "late_rate", "miss_rate")]
        assert (row["name"] == TRANSFORMERS) == (shares == [None] * 3)
        assert row["name"] == TRANSFORMERS or sum(shares) == pytest.approx(1)
    assert by_name[OURS]["tokens_per_round"] >= 1 == by_name[names[0]]["tokens_per_round"]
    asked = [bar["bar"] for bar in report["bars"][:5]]
    assert asked == [2.0, 1.3, 10.0, 0.20, 0.15]
    assert bars(report)["times " + names[1]]["value"] == pytest.approx(
        by_name[OURS]["tokens_per_s"] / by_name[names[1]]["tokens_per_s"]
    )
    text = format_policies(report)
    for line in (*names, *bars(report), *(trial["draft"] for trial in report["trials"])):
        assert line in text


def test_nobody_gets_more_memory_or_another_text(report: dict) -> None:
    assert bars(report)["different outputs at temperature 0"]["holds"]
    assert bars(report)["draft and cache, share of the experts' bytes"]["holds"]
    plain, same_memory, *speculating = report["rows"][:5]
    assert plain["memory_total"] <= same_memory["memory_total"]
    slot = speculating[0]["memory_total"] / 100
    assert max(row["memory_total"] for row in speculating) <= same_memory["memory_total"] + slot


def test_the_trial_tries_what_fits_and_the_best_is_chosen(report: dict) -> None:
    best = max(report["trials"], key=lambda trial: trial["tokens_per_s"])
    assert report["chosen"] == {name: best[name] for name in ("draft", "k", "slots")}
    assert {trial["k"] for trial in report["trials"]} <= set(policies.TRIAL_K)
    assert {"self-int4", "sparse", "sparse-1"} <= {trial["draft"] for trial in report["trials"]}
    assert "none" not in {trial["draft"] for trial in report["trials"]}


def test_the_split_pays_the_draft_first(model: str) -> None:
    config = EngineConfig(model=model)
    engine = Engine.load(EngineConfig(model=model, draft="self-int4"))
    try:
        draft, table = engine.draft_experts.nbytes, engine.cache.table
    finally:
        engine.close()
    one, slot = table.shape.nbytes, slot_nbytes(table.shape, torch.float32)
    split = split_memory(config, "self-int4", 0.5)
    assert (split.layers, split.expert_bytes) == (table.layers, table.layers * table.experts * one)
    assert split.limit_slots == split.expert_bytes // 2 // slot
    assert split.slots * slot + draft <= split.expert_bytes / 2 < (split.slots + 1) * slot + draft
    assert split_memory(config, "none", 0.5).slots == split.limit_slots
    assert split_memory(config, "self-int8", 0.1).slots < 0
    engine = Engine.load(dataclasses.replace(config, cache=split.budget))
    try:
        assert engine.cache.total_slots == split.slots
    finally:
        engine.close()


def test_disk_offload_says_what_transformers_says(model: str, cache_directory) -> None:
    resident, offloaded = Outcome(), Outcome()
    config = EngineConfig(model=model)
    run_transformers(config, 5, resident)
    run_disk_offload(config, 5, offloaded)
    assert offloaded.ids == resident.ids and offloaded.tokens == resident.tokens > 0
    assert not list(cache_directory.glob("disk-offload-*"))
    places = expert_map(model)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    owners = {name.rpartition(".")[0] for name, _ in skeleton.named_parameters()}
    assert {name for name, place in places.items() if place == "disk"} == {n for n in owners if n.endswith(".experts")}
    assert all(any(f"{owner}.".startswith(f"{place}.") for place in places) for owner in owners)


def test_the_ablations_report(ablated: dict) -> None:
    assert json.loads(json.dumps(ablated)) == ablated
    rows = {row["name"]: row for row in ablated["rows"]}
    wanted = {"prefetch: none", "prefetch: early", "prefetch: late", "KV: the draft's own"}
    wanted |= {f"draft: INT{bits}" for bits in (8, 3, 2)}
    assert wanted | {ablations.AS_IT_IS, *EVICTION.values()} <= set(rows)
    assert sum("corrupted" in name for name in rows) == 3
    assert bars(ablated)["different outputs at temperature 0"]["holds"]
    assert (
        rows["draft: INT8"]["memory_total"] > rows["draft: INT3"]["memory_total"] > rows["draft: INT2"]["memory_total"]
    )
    assert rows["KV: the draft's own"]["memory_total"] > rows[ablations.AS_IT_IS]["memory_total"]
    text = format_ablations(ablated)
    assert all(name in text for name in (*rows, BOUND))


def test_no_policy_beats_belady(ablated: dict) -> None:
    bound, *others = ablated["eviction"]
    assert (bound["policy"], [row["policy"] for row in others]) == (BOUND, list(EVICTION))
    for row in others:
        assert bound["loads_per_token"] <= row["loads_per_token"] <= row["requests_per_token"]
        assert row["over_bound"] == pytest.approx(row["loads_per_token"] / bound["loads_per_token"])


@pytest.mark.parametrize("suite", ["policies", "ablations"])
def test_the_command_line_prints_the_report(suite: str, report: dict, ablated: dict, monkeypatch, capsys) -> None:
    module, expected = (policies, report) if suite == "policies" else (ablations, ablated)
    asked = []
    monkeypatch.setattr(module, f"{suite}_suite", lambda *arguments: asked.append(arguments[1:3]) or expected)
    assert main(["bench", "--suite", suite, "--max-new-tokens", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main(["bench", "--suite", suite, "--repeats", "3"]) == 0
    assert expected["rows"][0]["name"] in capsys.readouterr().out
    assert asked == [(7, 1), (96, 3)]


def exhaustive(requests: list, slots: int) -> int:
    """The least loads, by trying everything that may be kept after each request."""

    @functools.cache
    def least(at: int, kept: frozenset) -> int:
        if at == len(requests):
            return 0
        layer, experts = requests[at]
        wanted = {(layer, expert) for expert in experts}
        here = sorted(kept | wanted)
        subsets = [[]]
        for pair in here:
            subsets += [[*subset, pair] for subset in subsets if len(subset) < slots]
        return len(wanted - kept) + min(least(at + 1, frozenset(subset)) for subset in subsets)

    return least(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_belady_is_the_least_of_all(seed: int) -> None:
    rng = random.Random(seed)
    requests = [(at % 2, tuple(rng.sample(range(3), rng.randint(1, 2)))) for at in range(7)]
    for slots in (1, 2, 3):
        assert belady_loads(requests, slots) == exhaustive(requests, slots)


def test_belady_with_room_for_all_loads_each_once() -> None:
    requests = [(layer, (0, 1, layer)) for _ in range(5) for layer in range(3)]
    requests = [(layer, tuple(dict.fromkeys(experts))) for layer, experts in requests]
    assert belady_loads(requests, 9) == len({(layer, e) for layer, experts in requests for e in experts})
    assert belady_loads(requests, 0) == sum(len(experts) for _, experts in requests)


def run(model: str, around=nullcontext, **changes) -> tuple[list[list[int]], dict]:
    config = EngineConfig(model=model, link=FAST, threads=1, cache=CacheBudget(slots=4), **changes)
    contender = Contender("one", config, 4, around=around)
    results = measure(contender, GenerationConfig(max_new_tokens=16))
    return [result["token_ids"] for result in results], contender_row(contender, results, None)


def test_a_log_sees_every_request_and_miss(model: str) -> None:
    log = RequestLog()
    engine = Engine.load(EngineConfig(model=model, link=FAST, policy="lru", prefetch="none", threads=1))
    try:
        with log.listen(engine):
            engine.generate([PROMPTS[0]], GenerationConfig(max_new_tokens=8, k=2))
        stats = engine.cache.stats
        engine.generate([PROMPTS[0]], GenerationConfig(max_new_tokens=2, k=2))  # it listens no more
    finally:
        engine.close()
    assert sum(len(experts) for _, experts in log.requests) == stats.requests
    assert log.misses == stats.misses > 0


def test_contenders_that_share_an_engine_do_not_mind(model: str) -> None:
    """Three in turn on one engine against each on its own: the same texts in as many rounds."""
    base = EngineConfig(model=model, link=FAST, threads=1, cache=CacheBudget(slots=4), prefetch="none")
    contenders = [
        Contender("lookahead", base, 3),
        Contender("own KV", base, 3, around=separate_kv),
        Contender("lru", dataclasses.replace(base, policy="lru"), 3),
        Contender("lookahead again", base, 3),
    ]
    options = GenerationConfig(max_new_tokens=12)
    together = measure_all(contenders, options, 1, lambda line: None)
    for contender in contenders:
        for one, other in zip(together[contender.name], measure(contender, options), strict=True):
            assert one["token_ids"] == other["token_ids"] and one["rounds"] == other["rounds"]
    assert together["lookahead"][0]["rounds"] == together["lookahead again"][0]["rounds"]


def test_misled_prefetches_are_wasted_and_the_text_stays(model: str) -> None:
    text, right = run(model, prefetch="draft")
    misled_text, misled = run(model, partial(corrupted_predictions, share=0.75), prefetch="draft")
    assert text == misled_text
    assert misled["wasted_share"] > right["wasted_share"]
    assert misled["mean_acceptance_length"] == right["mean_acceptance_length"]
    assert run(model, partial(corrupted_predictions, share=0.0), prefetch="draft")[0] == text


@pytest.mark.parametrize("draft", ["self-int8", "self-int2"])
def test_a_draft_with_its_own_kv_says_the_same(model: str, draft: str) -> None:
    text, shared = run(model, draft=draft)
    own_text, own = run(model, separate_kv, draft=draft)
    assert own_text == text
    assert own["tokens_per_round"] > 1 and shared["tokens_per_round"] > 1
