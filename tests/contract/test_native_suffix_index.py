"""The native suffix index against its twin, over random histories of requests that come, grow, end and leave their text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from triblade import _native
from triblade.spec.suffix_index import SuffixIndex, SuffixOptions

TOKENS = st.lists(st.integers(0, 4), max_size=12)
PROPOSE = st.tuples(st.just("propose"), st.integers(0, 2), TOKENS, st.integers(0, 10), st.sampled_from([0.0, 0.2, 0.5]))
SHARE = st.tuples(st.just("share"), TOKENS)
DROP = st.tuples(st.just("drop"), st.integers(0, 2))
OPTIONS = st.builds(
    SuffixOptions,
    shared_capacity_tokens=st.integers(5, 40),
    longest_match=st.integers(4, 8),
    max_candidates=st.integers(1, 12),
    own_minimum_match=st.integers(1, 3),
    shared_minimum_match=st.integers(1, 4),
)


@given(options=OPTIONS, calls=st.lists(st.one_of(PROPOSE, PROPOSE, SHARE, DROP), max_size=40))
@settings(max_examples=300)
def test_both_indexes_answer_every_call_alike(options: SuffixOptions, calls: list[tuple]) -> None:
    native, twin = _native.SuffixIndex(options), SuffixIndex(options)
    for name, *arguments in calls:
        assert getattr(native, name)(*arguments) == getattr(twin, name)(*arguments)
        assert native.num_requests == twin.num_requests
        assert native.num_shared_tokens == twin.num_shared_tokens <= options.shared_capacity_tokens


def test_long_texts_of_few_tokens_with_the_usual_options() -> None:
    options = SuffixOptions(shared_capacity_tokens=300)
    native, twin = _native.SuffixIndex(options), SuffixIndex(options)
    tokens = [(i * i // 7) % 11 for i in range(1500)]
    for start in range(0, len(tokens), 5):
        piece = tokens[start : start + 5]
        assert native.propose(start % 3, piece, 8, 0.3) == twin.propose(start % 3, piece, 8, 0.3)
        native.share(piece)
        twin.share(piece)
