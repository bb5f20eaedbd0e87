"""The governor on machines that exist as formulas only: it finds what is best on them, or at least never loses."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
from governor_worlds import EXPERTS, K_MAX, TOP_K, World, disturbed, drawn, play, wandering

from engine.control.cycle import CycleModel
from engine.control.governor import PLAIN, Governor
from engine.control.observation import Arm, Memory

#: Worlds with one thing that matters each.
#: A draft that is never right; with a cheap one, fetching the newest token's experts early would pay all the same.
NEVER = World(accept=0.0, draft=3e-3)
FREE = World(accept=1.0, draft=0.05e-3, transfer=1e-9)
#: Every draft token moves experts, hardly any is accepted.
BANDWIDTH_BOUND = World(accept=0.3, transfer=3e-3, slots=3)
#: The more tokens share an expert that was moved, the better.
LONG = World(accept=0.98, draft=0.5e-3, row=0.0, transfer=0.5e-3, slots=2)
USUAL = World()
SEEDS = range(4)


def plain(world: World) -> Arm:
    return PLAIN


def best(world: World) -> Arm:
    return world.best


@pytest.mark.parametrize("seed", range(24))
def test_it_comes_within_5_percent_of_the_best_of_many_worlds(seed: int):
    """Once it had 100 rounds to learn; and it never falls behind plain decoding by more than 3 %."""
    played = play(drawn(seed), seed)
    assert played.efficiency(best, 100) > 0.95
    assert played.efficiency(best) > 0.93, "learning takes too long"
    assert played.efficiency(plain, 100) > 0.97


@pytest.mark.parametrize("seed", range(12))
def test_it_comes_as_close_while_the_processor_becomes_faster_and_slower(seed: int):
    played = play(wandering(drawn(seed), seed), seed)
    assert played.efficiency(best, 100) > 0.95
    assert played.efficiency(plain, 100) > 0.97


def test_it_comes_close_on_a_machine_where_others_work():
    """Rounds take up to twice as long, at random: differences of a few percent drown."""
    efficiencies = [play(disturbed(drawn(seed)), seed).efficiency(best, 100) for seed in range(12)]
    assert mean(efficiencies) > 0.96 and min(efficiencies) > 0.88


@pytest.mark.parametrize("seed", SEEDS)
def test_a_draft_that_is_never_right_is_switched_off(seed: int):
    assert NEVER.best == PLAIN
    played = play(NEVER, seed)
    assert all(choice.k == 0 or choice.probing for choice in played.choices[20:])
    assert played.efficiency(plain) > 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_a_free_and_perfect_draft_is_as_long_as_allowed(seed: int):
    played = play(FREE, seed)
    assert played.efficiency(lambda world: Arm(K_MAX, False)) > 0.96


@pytest.mark.parametrize("seed", SEEDS)
def test_speculation_that_only_moves_more_bytes_is_switched_off(seed: int):
    assert BANDWIDTH_BOUND.best == PLAIN
    played = play(BANDWIDTH_BOUND, seed)
    assert played.share(0) > 0.9
    assert played.efficiency(plain) > 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_it_jumps_from_plain_decoding_to_long_drafts(seed: int):
    """Steps of one would still be on their way: what a short probe tells of the draft says what a long one brings."""
    assert LONG.best.k > 12
    played = play(lambda number: LONG if number >= 40 else replace(NEVER, slots=LONG.slots), seed)
    assert played.share(0, 20, 40) > 0.8
    assert played.efficiency(best, 200) > 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_prefetching_is_chosen_where_it_hides_transfers_and_not_where_it_does_not(seed: int):
    """By measurement: before it, the model promises as much for both."""
    hides = World(accept=0.8, slots=12, transfer=0.5e-3)
    wastes = replace(hides, hidden=0.0, waste=0.5, contention=0.3)
    assert hides.best.prefetch and not wastes.best.prefetch
    for world in (hides, wastes):
        arms = play(world, seed).arms(100)
        assert sum(arm.prefetch == world.best.prefetch for arm in arms) > 0.9 * len(arms)


@pytest.mark.parametrize("prefetch", ("draft", "none", "next-layer"))
def test_prefetching_that_a_person_set_is_not_changed(prefetch: str):
    for choice in play(USUAL, prefetch=prefetch, rounds=60).choices:
        assert choice.prefetch == (prefetch == "draft" and choice.k > 0)


def test_prefetching_is_chosen_for_a_fixed_k_too():
    played = play(World(accept=0.8, slots=12, transfer=0.5e-3), k=3, rounds=100)
    assert {choice.k for choice in played.choices} == {3}
    assert sum(choice.prefetch for choice in played.choices[20:]) > 70
    assert all("k = 3 was set by hand" in choice.reason for choice in played.choices)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_follows_a_draft_that_turns_bad_and_one_that_turns_good(seed: int):
    good, bad = replace(NEVER, accept=0.95), NEVER
    worse = play(lambda number: good if number < 200 else bad, seed)
    assert worse.choices[199].k > 0
    assert worse.share(0, 260) > 0.9
    better = play(lambda number: bad if number < 60 else good, seed)
    assert better.share(0, 40, 60) > 0.8
    assert better.share(0, 300) < 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_it_follows_a_link_that_a_person_changes(seed: int):
    """The transfers' part of the prediction scales at once, without a probe."""
    slow, fast = replace(USUAL, transfer=5e-3, draft=5e-3), replace(USUAL, transfer=1e-6, draft=5e-3)
    assert slow.best.k > 0 and fast.best == PLAIN
    played = play(lambda number: slow if number < 150 else fast, seed)
    assert played.efficiency(best, 170) > 0.95


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_move_it_every_round(seed: int):
    played = play(USUAL, seed)
    settled = [(choice.k, choice.prefetch) for choice in played.choices[100:] if not choice.probing]
    assert sum(one != two for one, two in zip(settled, settled[1:], strict=False)) < len(settled) / 15


def test_probes_become_rarer_while_they_change_nothing():
    choices = play(NEVER).choices
    probes = [number for number, choice in enumerate(choices) if choice.probing and number > 10]
    gaps = [two - one for one, two in zip(probes, probes[1:], strict=False)]
    assert len(gaps) >= 3 and gaps == sorted(gaps) and gaps[-1] >= 3 * gaps[0]
    assert all(choices[number + 1].k == 0 for number in probes)


@pytest.mark.parametrize("seed", SEEDS)
def test_probes_cost_what_they_may(seed: int):
    """Two percent of the time, as expected before each of them, and three rounds' in advance."""
    for world in (NEVER, USUAL, BANDWIDTH_BOUND):
        played = play(world, seed)
        total = sum(seen.seconds for seen in played.rounds)
        lost = sum(
            max(world.seconds(Arm(choice.k, choice.prefetch)) - world.tokens(choice.k) / world.rate(world.best), 0.0)
            for choice in played.choices[10:]
            if choice.probing
        )
        assert lost < 0.03 * total + 4 * world.seconds(world.best)


@pytest.mark.parametrize("k", (0, 3, 8, 16))
def test_a_fixed_k_is_respected_and_still_predicted(k: int):
    for choice in play(USUAL, k=k, prefetch="draft", rounds=50, k_max=8).choices:
        assert (choice.k, choice.auto, choice.probing) == (k, False, False)
        assert len(choice.rate) == max(k, 8) + 1


def test_without_a_drafter_nothing_is_drafted():
    governor = Governor(K_MAX, EXPERTS, TOP_K)
    for k in ("auto", 5):
        choice = governor.choose(k, 8, "auto", Memory(1e-3, 32), False)
        assert (choice.k, choice.prefetch, choice.reason) == (0, False, "no drafter: plain decoding")


@pytest.mark.parametrize(("k_max", "first"), [(2, 2), (16, 4)])
def test_it_first_measures_a_draft_with_prefetch_one_without_and_none(k_max: int, first: int):
    choices = play(USUAL, k_max=k_max, rounds=3).choices
    assert [(choice.k, choice.prefetch, choice.probing) for choice in choices] == [
        (first, True, True),
        (first, False, True),
        (0, False, True),
    ]


def test_choices_never_exceed_k_max():
    governor, draw = Governor(K_MAX, EXPERTS, TOP_K), random.Random(0)
    for number in range(200):
        k_max = (8, 1, 3)[number // 20 % 3]
        choice = governor.choose("auto", k_max, "auto", FREE.memory, True)
        assert 0 <= choice.k <= k_max and len(choice.rate) == k_max + 1
        governor.observe(FREE.play(Arm(choice.k, choice.prefetch), draw), FREE.memory)


def test_choices_say_why():
    played = play(USUAL)
    for choice in played.choices:
        assert 10 < len(choice.reason) < 120 and "\n" not in choice.reason
        assert str(Arm(choice.k, choice.prefetch)) in choice.reason
        for tokens, seconds, rate in zip(choice.expected_tokens, choice.seconds, choice.rate, strict=True):
            assert rate == pytest.approx(tokens / seconds if seconds else 0.0)
    assert len({choice.reason.split(" ")[0] for choice in played.choices}) >= 3  # measuring, moving or staying, probing


@pytest.mark.parametrize("seed", SEEDS)
def test_predictions_become_true(seed: int):
    """What it promises for its own choices is what those bring."""
    choices = play(USUAL, seed).choices[-100:]
    arms = [Arm(choice.k, choice.prefetch) for choice in choices]
    rates = [choice.rate[choice.k] / USUAL.rate(arm) for choice, arm in zip(choices, arms, strict=True)]
    tokens = [choice.expected_tokens[choice.k] / USUAL.tokens(choice.k) for choice in choices]
    seconds = [choice.seconds[choice.k] / USUAL.seconds(arm) for choice, arm in zip(choices, arms, strict=True)]
    assert mean(rates) == pytest.approx(1, abs=0.15)
    assert mean(tokens) == pytest.approx(1, abs=0.15)
    assert mean(seconds) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("room", (0, 1, 3, 7))
def test_the_last_tokens_of_a_text_are_no_probes_and_change_no_mind(room: int):
    """Drafts that must be short for want of tokens say nothing about the next text."""
    governor, draw = Governor(K_MAX, EXPERTS, TOP_K), random.Random(1)
    for _ in range(60):
        choice = governor.choose("auto", K_MAX, "auto", FREE.memory, True)
        governor.observe(FREE.play(Arm(choice.k, choice.prefetch), draw), FREE.memory)
    favourite = governor._favourite
    assert favourite is not None and favourite.k > room
    for _ in range(60):
        choice = governor.choose("auto", K_MAX, "auto", FREE.memory, True, room)
        assert choice.k <= room and not choice.probing
        assert len(choice.rate) == K_MAX + 1  # the curve on the page keeps its length
        assert governor._favourite == favourite
    # A text that is far from its end is as if nothing had been said.
    later = governor.choose("auto", K_MAX, "auto", FREE.memory, True, K_MAX)
    assert later.k > room or later.probing


def test_a_cold_cache_is_not_held_against_the_draft_that_met_it():
    """Of a round that found everything missing, the next round's prediction learns the loads, not a worse formula."""
    warm = World(noise=0.0)
    model = CycleModel(K_MAX, EXPERTS, TOP_K)
    arm, draw = Arm(8, False), random.Random(2)
    for _ in range(20):
        model.observe(warm.play(arm, draw), warm.memory)
    (before,) = model.seconds([8], False, warm.memory)
    usual = warm.play(arm, draw)
    cold = replace(
        usual,
        misses=usual.wanted,
        seconds=usual.seconds + (usual.wanted[-1] - usual.misses[-1]) * warm.transfer,
        stall_seconds=usual.stall_seconds + (usual.wanted[-1] - usual.misses[-1]) * warm.transfer,
    )
    assert cold.seconds > 1.2 * usual.seconds
    model.observe(cold, warm.memory)
    loads = model.loads.missing(9) * warm.transfer
    assert model._corrections[False](8) == pytest.approx(1, abs=0.05)
    for _ in range(20):
        model.observe(warm.play(arm, draw), warm.memory)
    assert model.seconds([8], False, warm.memory)[0] == pytest.approx(before, rel=0.03)
    assert loads > model.loads.missing(9) * warm.transfer


def test_a_batch_promises_the_tokens_of_all_its_sequences():
    """Else a probe of a batch of 16 would bring 16 times what was promised, and always be a surprise."""
    alone, together = Governor(K_MAX, EXPERTS, TOP_K), Governor(K_MAX, EXPERTS, TOP_K)
    draws = random.Random(3), random.Random(3)
    for _ in range(200):
        one = alone.choose("auto", K_MAX, "auto", USUAL.memory, True)
        all_of_them = together.choose("auto", K_MAX, "auto", USUAL.memory, True, None, 16)
        assert (all_of_them.k, all_of_them.prefetch, all_of_them.probing) == (one.k, one.prefetch, one.probing)
        assert all_of_them.rate == pytest.approx([16 * rate for rate in one.rate])
        arm = Arm(one.k, one.prefetch)
        alone.observe(USUAL.play(arm, draws[0]), USUAL.memory)
        seen = USUAL.play(arm, draws[1])
        together.observe(replace(seen, tokens=16 * seen.tokens), USUAL.memory)
