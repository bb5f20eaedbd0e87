"""Prompt lookup against a plain search of the whole text."""

from __future__ import annotations

import random

import pytest

from engine.speculation.drafters.ngram import LONGEST, SHORTEST, SuffixIndex


def searched(text: list[int], k: int) -> list[int]:
    """The same by definition: the longest suffix that stands somewhere before, at its newest place."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                grown = list(text)
                for i in range(k):
                    grown.append(grown[start + n + i])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize("letters", (1, 2, 4, 20))
def test_finds_what_a_search_finds(letters: int):
    random_ = random.Random(letters)
    text: list[int] = []
    index = SuffixIndex()
    found = 0
    while len(text) < 300:
        more = [random_.randrange(letters) for _ in range(random_.randrange(4))]
        text += more
        index.extend(more)
        assert len(index) == len(text)
        k = random_.randrange(1, 12)
        assert index.continuation(k) == searched(text, k)
        found += bool(searched(text, k))
    assert found > 20


def test_longest_suffix_first_and_the_newest_of_equals():
    index = SuffixIndex()
    index.extend([1, 2, 3, 10, 9, 2, 3, 20, 1, 2, 3])
    assert index.continuation(2) == [10, 9]  # 1 2 3 is longer than 2 3, though older
    index.extend([30, 2, 3])
    assert index.continuation(1) == [30]


def test_a_loop_goes_on():
    index = SuffixIndex()
    index.extend([7, 1, 2, 3, 1, 2, 3])
    assert index.continuation(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_work_a_token_does_not_grow_with_the_text():
    """Entries, not seconds: each token adds one for each length of suffix."""
    index = SuffixIndex()
    sizes = []
    for start in range(0, 4000, 1000):
        index.extend(range(start, start + 1000))
        sizes.append(len(index._after))
    assert {b - a for a, b in zip(sizes, sizes[1:], strict=False)} == {1000 * (LONGEST - SHORTEST + 1)}
