"""Where a text was heading the last time it looked like this: the search behind the suffix drafter.

After SuffixDecoding (NeurIPS 2025): follow the most frequent continuation of the longest earlier match of the text's end, as far
as its estimated probability allows; here over chains of equal runs of tokens, as in LZ77, instead of a suffix tree, so that an
append costs O(1) and the oldest token can be forgotten in O(1). This is the slow twin of csrc/suffix_index.cpp, used where the
native module was not built. Knows no model. Invariants: both give the same proposals; the shared text never exceeds its capacity.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

END = -1  # closes each piece of the shared text; equal to no token


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """What counts as a match and how far to trust it; chosen by `benchmarks/suffix_tuning.py` on prompts of their own.

    A match of n tokens that was followed by a token `number` times of `total` is taken to go on like that with probability
    number / (total + doubt / (n - minimum + 1)): other continuations are imagined, the fewer the longer the match.
    """

    shared_capacity_tokens: int = 2**17
    longest_match: int = 32  # tokens of a match that are looked at
    max_candidates: int = 64  # newest occurrences that are looked at
    own_minimum_match: int = 1
    own_doubt: float = 4 / 3
    shared_minimum_match: int = 4
    shared_doubt: float = 2.0  # another request's text says less


class Index(Protocol):
    """What `SuffixIndex` and `triblade._native.SuffixIndex` do."""

    def propose(self, request: int, tokens: list[int], length: int, least: float) -> list[int]:
        """Append to a request's text, then continue it.

        At most `length` tokens, as long as the estimated probability that all of them are right is at least `least`.
        """
        ...

    def share(self, tokens: list[int]) -> None:
        """Append to the shared text; no match and no proposal crosses from one such piece to another."""
        ...

    def drop(self, request: int) -> None:
        """Forget a request's text."""
        ...

    @property
    def num_requests(self) -> int: ...

    @property
    def num_shared_tokens(self) -> int: ...


class Text:
    """The newest `capacity` tokens of a text, by position from its very first one, and where each run of `minimum` tokens ends."""

    def __init__(self, minimum: int, capacity: int | None = None) -> None:
        self.minimum = minimum
        self.begin = self.end = 0
        self._capacity = capacity
        self._tokens: dict[int, int] = {}  # position -> token
        self._ends: dict[tuple[int, ...], deque[int]] = {}  # run -> positions of its last tokens, oldest first

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, position: int) -> int:
        return self._tokens[position]

    def append(self, token: int) -> None:
        """Add a token; the oldest one goes when there is no room."""
        if len(self) == self._capacity:
            self._forget_oldest()
        self._tokens[self.end] = token
        self.end += 1
        if len(self) >= self.minimum:
            self._ends.setdefault(self.last_tokens(self.minimum), deque()).append(self.end - 1)

    def last_tokens(self, number: int) -> tuple[int, ...]:
        """The run of `number` tokens at the end."""
        return self._run(self.end - 1, number)

    def newest_ends(self, run: tuple[int, ...]) -> Iterator[int]:
        """Positions where a run of `minimum` tokens ends, newest first."""
        return reversed(self._ends.get(run, deque()))

    def _run(self, last: int, number: int) -> tuple[int, ...]:
        return tuple(self._tokens[position] for position in range(last - number + 1, last + 1))

    def _forget_oldest(self) -> None:
        run = self._run(self.begin + self.minimum - 1, self.minimum)
        self._ends[run].popleft()
        if not self._ends[run]:
            del self._ends[run]
        del self._tokens[self.begin]
        self.begin += 1


class SuffixIndex:
    """A text of its own for every request, and one of ended requests for all."""

    def __init__(self, options: SuffixOptions) -> None:
        self._options = options
        self._shared = Text(options.shared_minimum_match, options.shared_capacity_tokens)
        self._own: dict[int, Text] = {}

    @property
    def num_requests(self) -> int:
        return len(self._own)

    @property
    def num_shared_tokens(self) -> int:
        return len(self._shared)

    def propose(self, request: int, tokens: Sequence[int], length: int, least: float) -> list[int]:
        """See `Index.propose`."""
        text = self._own.setdefault(request, Text(self._options.own_minimum_match))
        for token in tokens:
            text.append(token)
        limits = (length, least)
        own, expected_own = self._search(text, text, self._options.own_doubt, limits)
        shared, expected_shared = self._search(self._shared, text, self._options.shared_doubt, limits)
        return shared if expected_shared > expected_own else own

    def share(self, tokens: Sequence[int]) -> None:
        """See `Index.share`."""
        for token in (*tokens, END):
            self._shared.append(token)

    def drop(self, request: int) -> None:
        """See `Index.drop`."""
        self._own.pop(request, None)

    def _search(self, text: Text, query: Text, doubt: float, limits: tuple[int, float]) -> tuple[list[int], float]:
        """A continuation of `query` found in `text`, and how many of its tokens are expected to be accepted."""
        length, least = limits
        longest, ways = self._longest_matches(text, query)
        match = longest - text.minimum + 1  # counted from the shortest that says anything
        proposal: list[int] = []
        probability, expected = 1.0, 0.0
        while len(proposal) < length:
            following = [(way, _token_at(text, proposal, way + len(proposal))) for way in ways]
            counts = Counter(token for _, token in following if token != END)
            if not counts:
                break
            best, number = counts.most_common(1)[0]  # of equals the one met first: the newest
            probability *= number / (counts.total() + doubt / (match + len(proposal)))
            if probability < least:
                break
            ways = [way for way, token in following if token == best]
            proposal.append(best)
            expected += probability
        return proposal, expected

    def _longest_matches(self, text: Text, query: Text) -> tuple[int, list[int]]:
        """Length of the longest matches of the end of `query` in `text`, and the positions after them, newest first."""
        if len(query) < text.minimum:
            return 0, []
        ends = text.newest_ends(query.last_tokens(text.minimum))
        present = 1 if text is query else 0  # the end of a text is no match of itself
        found = [
            (self._common_length(text, last, query), last + 1)
            for last in islice(ends, present, present + self._options.max_candidates)
            if text[last + 1] != END
        ]
        longest = max((length for length, _ in found), default=0)
        return longest, [position for length, position in found if length == longest]

    def _common_length(self, text: Text, last: int, query: Text) -> int:
        """How many tokens up to `last` agree with the end of `query`, `longest_match` at most."""
        most = min(self._options.longest_match, last - text.begin + 1, len(query))
        differing = (back for back in range(most) if text[last - back] != query[query.end - 1 - back])
        return next(differing, most)


def _token_at(text: Text, proposal: Sequence[int], position: int) -> int:
    """A token of a text, or of the proposal where the text has run into the present."""
    return text[position] if position < text.end else proposal[position - text.end]
