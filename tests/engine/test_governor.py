"""The governor on machines that exist as formulas only: it finds the best k, or at least never loses to k = 0."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from engine.control.governor import Choice, Governor, Observation

K_MAX, ROUNDS = 8, 500


@dataclass(frozen=True)
class Machine:
    """Costs in seconds. `accept`: chance that a draft token is right; a row adds `fresh` times fewer missing experts
    than the one before; `hidden`: the share of compute under which a prefetch really proceeds."""

    accept: float = 0.8
    draft: float = 1e-3
    verify: float = 4e-3
    row: float = 0.2e-3
    missing: float = 6.0
    fresh: float = 0.8
    transfer: float = 1e-3
    overhead: float = 0.2e-3
    hidden: float = 1.0
    prefetching: bool = True
    noise: float = 0.05

    def misses(self, rows: int) -> list[int]:
        return [round(self.missing * sum(self.fresh**i for i in range(r + 1))) for r in range(rows)]

    def play(self, k: int, random_: random.Random) -> Observation:
        """One round."""
        passes = k + 1 if k and self.prefetching else k
        draft = passes * self.draft * random_.lognormvariate(0, self.noise)
        verify = (self.verify + self.row * (k + 1)) * random_.lognormvariate(0, self.noise)
        moving = self.misses(k + 1)[-1] * self.transfer
        if k and self.prefetching:
            moving = max(0.0, moving - self.hidden * (draft + verify))
        accepted = 0
        while accepted < k and random_.random() < self.accept:
            accepted += 1
        return Observation(
            k=k,
            draft_passes=passes,
            draft_seconds=draft,
            verify_seconds=verify,
            stall_seconds=moving,
            overhead_seconds=self.overhead,
            seconds=draft + verify + moving + self.overhead,
            tokens=accepted + 1,
            lengths=[(min(accepted + 1, k), accepted)],
            misses=self.misses(k + 1),
        )

    def rate(self, k: int) -> float:
        """Expected tokens/s of always drafting k, without noise."""
        quiet = replace(self, noise=0.0)
        return sum(self.accept**i for i in range(k + 1)) / quiet.play(k, random.Random(0)).seconds


@dataclass
class Played:
    """What 500 rounds brought."""

    choices: list[Choice]
    rounds: list[Observation]

    @property
    def rate(self) -> float:
        return sum(r.tokens for r in self.rounds) / sum(r.seconds for r in self.rounds)

    def share(self, k: int, after: int = 100) -> float:
        ks = [choice.k for choice in self.choices[after:]]
        return ks.count(k) / len(ks)


def play(machine: Machine | Callable[[int], Machine], seed: int = 0, asked: int | str = "auto") -> Played:
    """The governor drives `machine`, which may change with the round."""
    random_, governor, played = random.Random(seed), Governor(16, 16, 2), Played([], [])
    for number in range(ROUNDS):
        now = machine(number) if callable(machine) else machine
        played.choices.append(governor.choose(asked, K_MAX, now.transfer, now.prefetching, True))
        played.rounds.append(now.play(played.choices[-1].k, random_))
        governor.observe(played.rounds[-1], now.transfer, now.prefetching)
    return played


NEVER = Machine(accept=0.0)
FREE = Machine(accept=1.0, draft=0.05e-3, transfer=1e-9)
BANDWIDTH_BOUND = Machine(accept=0.4, missing=16, fresh=0.97, transfer=4e-3)
USUAL = Machine()
SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_draft_that_is_never_right_is_switched_off(seed: int):
    played = play(NEVER, seed)
    assert all(choice.k == 0 or choice.probing for choice in played.choices[40:])
    assert played.rate > 0.98 * NEVER.rate(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_free_and_perfect_draft_is_as_long_as_allowed(seed: int):
    played = play(FREE, seed)
    assert played.share(K_MAX, after=10) > 0.95
    assert played.rate > 0.97 * FREE.rate(K_MAX)


@pytest.mark.parametrize("seed", SEEDS)
def test_speculation_that_only_moves_more_bytes_is_switched_off(seed: int):
    assert max(range(K_MAX + 1), key=BANDWIDTH_BOUND.rate) == 0
    played = play(BANDWIDTH_BOUND, seed)
    assert played.share(0) > 0.95
    assert played.rate > 0.97 * BANDWIDTH_BOUND.rate(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_where_it_pays_most_of_the_gain_is_found(seed: int):
    best = max(map(USUAL.rate, range(K_MAX + 1)))
    assert best > 1.5 * USUAL.rate(0)
    assert play(USUAL, seed).rate > 0.9 * best


@pytest.mark.parametrize("seed", range(24))
def test_never_slower_than_plain_decoding_by_more_than_its_probes(seed: int):
    """Machines of all kinds. Beyond probes, it may lose what its hysteresis leaves, and what it takes to learn."""
    draw = random.Random(seed)
    machine = Machine(
        accept=draw.choice((0.0, 0.3, 0.6, 0.9, 1.0)),
        draft=draw.choice((0.1e-3, 1e-3, 5e-3)),
        row=draw.choice((0.0, 0.5e-3, 3e-3)),
        missing=draw.choice((0.0, 4.0, 16.0)),
        fresh=draw.choice((0.5, 0.9, 1.0)),
        transfer=draw.choice((0.1e-3, 1e-3, 5e-3)),
        hidden=draw.choice((0.0, 0.5, 1.0)),
        prefetching=draw.random() < 0.7,
    )
    played, plain = play(machine, seed), 1 / machine.rate(0)
    spent = sum(r.seconds for r in played.rounds)
    probes = sum(
        max(r.seconds - r.tokens * plain, 0.0)
        for choice, r in zip(played.choices, played.rounds, strict=True)
        if choice.probing
    )
    assert spent - probes < 1.06 * plain * sum(r.tokens for r in played.rounds)


def test_plain_decoding_wins_where_prefetching_hides_nothing():
    """The prediction says that transfers hide under the draft; here they do not, and only measuring tells."""
    machine = Machine(accept=0.9, draft=5e-3, row=0.5e-3, missing=4.0, fresh=1.0, transfer=5e-3, hidden=0.0)
    assert machine.rate(0) > 1.15 * max(map(machine.rate, range(1, K_MAX + 1)))
    assert play(machine).share(0) > 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_it_follows_a_draft_that_turns_bad_and_one_that_turns_good(seed: int):
    good, bad = replace(USUAL, accept=0.95), replace(USUAL, accept=0.0)
    worse = play(lambda number: good if number < 250 else bad, seed)
    assert worse.choices[249].k > 0
    # Here a useless draft token costs 9 %, so it takes some evidence to switch off.
    assert worse.share(0, after=350) > 0.9
    better = play(lambda number: bad if number < 60 else good, seed)
    assert better.choices[59].k == 0 or better.choices[59].probing
    assert better.share(0, after=350) < 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_move_k_every_round(seed: int):
    settled = [choice.k for choice in play(USUAL, seed).choices[100:] if not choice.probing]
    assert sum(one != two for one, two in zip(settled, settled[1:], strict=False)) < len(settled) / 20


def test_probes_become_rarer_while_they_change_nothing():
    probes = [number for number, choice in enumerate(play(NEVER).choices) if choice.probing and number > 20]
    gaps = [two - one for one, two in zip(probes, probes[1:], strict=False)]
    assert len(gaps) >= 3 and gaps == sorted(gaps) and gaps[-1] > 4 * gaps[0]
    # A probe looks at a neighbour, and the next round returns.
    choices = play(NEVER).choices
    assert all(choices[number].k == 1 and choices[number + 1].k == 0 for number in probes)


@pytest.mark.parametrize("k", (0, 3, 8, 16))
def test_a_fixed_k_is_respected_and_still_predicted(k: int):
    for choice in play(USUAL, asked=k).choices:
        assert (choice.k, choice.auto, choice.probing) == (k, False, False)
        assert len(choice.rate) == max(k, K_MAX) + 1


def test_without_a_drafter_nothing_is_drafted():
    governor = Governor(16, 16, 2)
    for asked in ("auto", 5):
        assert governor.choose(asked, K_MAX, 1e-3, True, False).k == 0


def test_choices_never_exceed_k_max():
    governor, random_ = Governor(16, 16, 2), random.Random(0)
    for number in range(200):
        k_max = (8, 1, 3)[number // 20 % 3]
        choice = governor.choose("auto", k_max, FREE.transfer, True, True)
        assert 0 <= choice.k <= k_max and len(choice.rate) == k_max + 1
        governor.observe(FREE.play(choice.k, random_), FREE.transfer, True)


def test_choices_say_why():
    played = play(USUAL)
    for choice in played.choices:
        assert 10 < len(choice.reason) < 120 and "\n" not in choice.reason
        assert f"k = {choice.k}" in choice.reason
        for tokens, seconds, rate in zip(choice.expected_tokens, choice.seconds, choice.rate, strict=True):
            assert rate == pytest.approx(tokens / seconds if seconds else 0.0)
    assert len({choice.reason.split(" ")[0] for choice in played.choices}) >= 3  # measuring, moving or staying, probing


def test_predictions_become_true():
    """After 500 noisy rounds, what it promises for its own k is what that k brings."""
    played = play(USUAL)
    last = played.choices[-1]
    assert last.rate[last.k] == pytest.approx(USUAL.rate(last.k), rel=0.15)
    assert last.expected_tokens[last.k] == pytest.approx(sum(0.8**i for i in range(last.k + 1)), rel=0.15)
