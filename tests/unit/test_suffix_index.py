"""The suffix index: what counts as a match, which continuation is taken, how far it goes, and what is forgotten.

Every case runs on the twin, and on the native index where it was built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triblade.spec.suffix_index import Index, SuffixIndex, SuffixOptions

Maker = Callable[[SuffixOptions], Index]
MAKERS: dict[str, Maker] = {"twin": SuffixIndex}
if find_spec("triblade._native"):
    MAKERS["native"] = import_module("triblade._native").SuffixIndex
# No doubt: every match is followed as far as asked.
BOLD = SuffixOptions(own_doubt=0.0, shared_doubt=0.0, shared_minimum_match=1)


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Maker:
    return MAKERS[request.param]


def test_it_goes_on_as_the_text_did_before(make: Maker) -> None:
    assert make(BOLD).propose(0, [1, 2, 3, 4, 5, 9, 2, 3], 3, 0.0) == [4, 5, 9]


def test_a_text_that_never_looked_like_this_is_not_continued(make: Maker) -> None:
    assert make(BOLD).propose(0, [1, 2, 3], 3, 0.0) == []
    assert make(BOLD).propose(0, [], 3, 0.0) == []
    assert make(BOLD).propose(0, [7, 7], 0, 0.0) == []


def test_tokens_come_in_any_portions(make: Maker) -> None:
    index = make(BOLD)
    for token in [1, 2, 3, 4, 5, 9, 2]:
        index.propose(0, [token], 1, 0.0)
    assert index.propose(0, [3], 2, 0.0) == [4, 5]


def test_the_longest_match_decides_before_frequency(make: Maker) -> None:
    #            2 3 -> 8 twice, 1 2 3 -> 4 once
    assert make(BOLD).propose(0, [1, 2, 3, 4, 5, 2, 3, 8, 6, 2, 3, 8, 1, 2, 3], 1, 0.0) == [4]


def test_among_equal_matches_the_most_frequent_continuation_is_taken(make: Maker) -> None:
    assert make(BOLD).propose(0, [5, 1, 6, 1, 5, 1, 6, 2, 5, 1, 7, 3, 1], 1, 0.0) == [6]


def test_of_continuations_equally_frequent_the_newest_is_taken(make: Maker) -> None:
    assert make(BOLD).propose(0, [1, 6, 2, 1, 7, 3, 1], 1, 0.0) == [7]


def test_frequencies_are_conditional_on_the_path(make: Maker) -> None:
    # After 1: 2 three times of four; after 1 2: 5 twice of three. 3/4 passes 0.6, 3/4 * 2/3 does not.
    text = [1, 2, 5, 9, 1, 2, 6, 8, 1, 2, 5, 7, 1, 3, 4, 1]
    assert make(BOLD).propose(0, text, 4, 0.6) == [2]
    assert make(BOLD).propose(0, text, 2, 0.49) == [2, 5]


@pytest.mark.parametrize(("match", "length"), [(1, 0), (2, 1), (4, 3), (8, 6), (16, 12)])
def test_a_longer_match_proposes_more(make: Maker, match: int, length: int) -> None:
    """One occurrence of n tokens gives 1 / (1 + 1/n) = n / (n + 1), the next token (n + 1) / (n + 2): n / (n + length) together."""
    assert match / (match + length) >= 0.56 > match / (match + length + 1)
    run, rest = list(range(100, 100 + match)), list(range(200, 240))
    options = replace(BOLD, own_doubt=1.0)
    assert make(options).propose(0, [1, *run, *rest, 2, *run], 40, 0.56) == rest[:length]


def test_a_loop_runs_on_into_its_own_proposal(make: Maker) -> None:
    assert make(BOLD).propose(0, [9, 1, 2, 3, 1, 2, 3], 8, 0.0) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_shorter_matches_than_the_minimum_do_not_count(make: Maker) -> None:
    options = replace(BOLD, own_minimum_match=3)
    assert make(options).propose(0, [1, 2, 3, 4, 9, 2, 3], 1, 0.0) == []
    assert make(options).propose(0, [1, 2, 3, 4, 9, 1, 2, 3], 1, 0.0) == [4]


def test_only_the_newest_candidates_are_looked_at(make: Maker) -> None:
    text = [8, 1, 5, *[1, 6] * 3, 8, 1]
    assert make(BOLD).propose(0, text, 1, 0.0) == [5]  # the match of two tokens
    assert make(replace(BOLD, max_candidates=3)).propose(0, text, 1, 0.0) == [6]


def test_matches_are_compared_as_far_as_the_longest(make: Maker) -> None:
    text = [7, 8, 9, 1, 6, 8, 9, 2, 6, 8, 9, 2, 7, 8, 9]
    assert make(BOLD).propose(0, text, 1, 0.0) == [1]
    assert make(replace(BOLD, longest_match=2)).propose(0, text, 1, 0.0) == [2]


def test_requests_do_not_see_each_other(make: Maker) -> None:
    index = make(BOLD)
    index.propose(0, [1, 2, 3], 1, 0.0)
    assert index.propose(1, [5, 1, 2], 1, 0.0) == []
    assert index.num_requests == 2


def test_shared_text_is_seen_by_all(make: Maker) -> None:
    index = make(BOLD)
    index.share([1, 2, 3, 4])
    assert index.propose(0, [9, 1, 2], 3, 0.0) == [3, 4]
    assert index.propose(1, [9, 2], 1, 0.0) == [3]


def test_nothing_crosses_from_one_shared_piece_to_another(make: Maker) -> None:
    index = make(replace(BOLD, shared_minimum_match=2))
    index.share([1, 2])
    index.share([3, 4, 5])
    assert index.propose(0, [1, 2], 3, 0.0) == []  # a piece ends there
    assert index.propose(1, [2, 3], 3, 0.0) == []  # no piece holds this
    assert index.propose(2, [3, 4], 3, 0.0) == [5]


def test_the_source_expected_to_be_right_more_often_is_taken(make: Maker) -> None:
    index = make(replace(BOLD, own_doubt=1.0, shared_doubt=4.0))
    index.share([1, 2, 3, 4, 5, 6, 7, 8])
    assert index.propose(0, [5, 90, 3, 5], 1, 0.0) == [90]  # one token either way: 1/2 against 1/5
    assert index.propose(1, [5, 90, 3, 1, 2, 3, 4, 5], 1, 0.0) == [6]  # one token, 1/2, against five, 5/9


def test_own_text_is_taken_when_both_are_equal(make: Maker) -> None:
    index = make(BOLD)
    index.share([5, 80, 1])
    assert index.propose(0, [5, 90, 3, 5], 1, 0.0) == [90]


def test_the_oldest_shared_tokens_are_forgotten(make: Maker) -> None:
    index = make(replace(BOLD, shared_capacity_tokens=10))
    index.share([1, 2, 3, 4])  # 5 places with its end
    index.share([5, 6, 7, 8])
    assert index.num_shared_tokens == 10
    assert index.propose(0, [1], 1, 0.0) == [2]
    index.share([9])  # two more: 1 and 2 are gone
    assert index.num_shared_tokens == 10
    assert index.propose(1, [1], 1, 0.0) == []
    assert index.propose(2, [2], 1, 0.0) == []
    assert index.propose(3, [3], 1, 0.0) == [4]
    assert index.propose(4, [7], 1, 0.0) == [8]


def test_a_run_that_came_again_outlives_its_first_place(make: Maker) -> None:
    index = make(replace(BOLD, shared_capacity_tokens=8, shared_minimum_match=2))
    index.share([1, 2, 3])
    index.share([1, 2, 4])
    index.share([5, 6])  # the first 1 2 3 is gone
    assert index.propose(0, [1, 2], 1, 0.0) == [4]


def test_a_dropped_request_leaves_nothing(make: Maker) -> None:
    index = make(BOLD)
    index.propose(0, [1, 2, 3, 1], 1, 0.0)
    index.drop(0)
    index.drop(7)  # never seen
    assert index.num_requests == 0
    assert index.propose(0, [1], 1, 0.0) == []


def scanned(text: Sequence[int], options: SuffixOptions, length: int, least: float) -> list[int]:
    """The definition, on one list, by looking everywhere."""
    end, found = len(text), []
    for start in range(end - 1, 0, -1):
        match = 0
        while match < min(start, options.longest_match) and text[start - 1 - match] == text[end - 1 - match]:
            match += 1
        if match >= options.own_minimum_match:
            found.append((match, start))
    found = found[: options.max_candidates]
    match = max((match for match, _ in found), default=0)
    ways = [list(text[start:]) for length_, start in found if length_ == match]
    proposal: list[int] = []
    probability = 1.0
    for step in range(length if ways else 0):
        ways = [way if len(way) > step else [*way, *proposal] for way in ways]
        tokens = [way[step] for way in ways]
        best = max(tokens, key=lambda token: (tokens.count(token), -tokens.index(token)))
        probability *= tokens.count(best) / (
            len(tokens) + options.own_doubt / (match - options.own_minimum_match + 1 + step)
        )
        if probability < least:
            break
        ways = [way for way in ways if way[step] == best]
        proposal.append(best)
    return proposal


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    length=st.integers(0, 9),
    minimum=st.integers(1, 3),
    candidates=st.integers(1, 9),
    least=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_the_twin_does_what_looking_everywhere_does(
    text: list[int], length: int, minimum: int, candidates: int, least: float
) -> None:
    options = SuffixOptions(own_minimum_match=minimum, max_candidates=candidates, longest_match=6)
    assert SuffixIndex(options).propose(0, text, length, least) == scanned(text, options, length, least)
