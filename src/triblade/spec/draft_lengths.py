"""Draft lengths for the requests of a step, as a search for the highest rate of tokens.

Knows no history, no step and no clock: what drafts promise and what things cost are given. A drafter that ends its drafts where it
is unsure offers less than it is asked for, and what is offered is what costs: rows of the step by the tokens offered, drafting by
the tokens tried. Invariant: what is found is never worse than drafting nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from triblade.spec.draft_cost import DraftTimes
from triblade.spec.step_cost import RowTimes

NEGLIGIBLE = 0.02  # a token that is accepted less often than this where it is offered is not worth the thought


@dataclass(frozen=True, slots=True)
class Prospect:
    """What drafts of a request promise."""

    likelihood: list[float]  # by position: that it is accepted, if it is offered; never rises from one to the next
    rows: list[float]  # by length asked for, from 0: expected rows of the step,
    variance: list[float]  # and their variance
    tokens: list[float]  # by length asked for, from 0: expected tokens of the step
    reach: list[float]  # by position: chance that it is tried, which it is if those before it were offered

    @classmethod
    def of(cls, accepted: Sequence[float], offered: Sequence[float], backed: Sequence[float]) -> Prospect:
        """From chances of each position.

        Args:
            accepted: that it is right, if it is offered and those before it were right.
            offered: that it is offered, if those before it were.
            backed: the same if those were right: who guessed well so far is surer of the next token.
        """
        likelihood, rows, tokens, reach, variance = list[float](), [1.0], [1.0], list[float](), [0.0]
        chance = offer = lowest = 1.0
        square = 0.0  # expectation of the square of the tokens offered
        for position, accept in enumerate(accepted):
            reach.append(offer)
            chance *= accept * backed[position]
            offer = max(chance, offer * offered[position])  # what is accepted was offered
            lowest = min(lowest, chance / offer)
            likelihood.append(lowest)
            rows.append(rows[-1] + offer)
            tokens.append(tokens[-1] + chance)
            square += (2 * position + 1) * offer
            variance.append(square - (rows[-1] - 1.0) ** 2)
        return cls(likelihood, rows, variance, tokens, reach)


class DraftSearch:
    """The requests of a step, as a function from draft lengths to tokens per time."""

    def __init__(self, prospects: list[Prospect], row_times: RowTimes, draft_times: DraftTimes) -> None:
        self._prospects = prospects
        self._row_times = row_times
        self._draft_times = draft_times

    def with_prospects(self, prospects: list[Prospect]) -> DraftSearch:
        """The same costs, other promises."""
        return DraftSearch(prospects, self._row_times, self._draft_times)

    def rate(self, lengths: Sequence[int]) -> float:
        """Committed tokens per time, expected."""
        plan = self._nothing()
        for prospect, wanted in zip(self._prospects, lengths, strict=True):
            for position in range(min(wanted, len(prospect.likelihood))):
                plan.add(prospect, position)
        return plan.rate

    def best_lengths(self, most_rows: float) -> list[int]:
        """The lengths with the highest rate among those that `_fill` finds for each greatest length."""
        steps = sorted(
            (-likelihood, position, index)
            for index, prospect in enumerate(self._prospects)
            for position, likelihood in enumerate(prospect.likelihood)
            if likelihood > NEGLIGIBLE
        )
        best = [0] * len(self._prospects)
        best_rate = self.rate(best)
        for depth in range(1, 1 + max((position + 1 for _, position, _ in steps), default=0)):
            rate, taken = self._fill([(index, position) for _, position, index in steps if position < depth], most_rows)
            if rate > best_rate:
                best_rate, best = rate, [taken.count(index) for index in range(len(best))]
        return best

    def _fill(self, steps: list[tuple[int, int]], most_rows: float) -> tuple[float, list[int]]:
        """Add tokens, likeliest first; the best rate on the way, and whose tokens were added until then."""
        plan = self._nothing()
        best_rate, best_count = 0.0, 0
        for count, (index, position) in enumerate(steps, 1):
            plan.add(self._prospects[index], position)
            if plan.rows > most_rows:
                break
            rate = plan.rate
            if rate > best_rate:
                best_rate, best_count = rate, count
        return best_rate, [index for index, _ in steps[:best_count]]

    def _nothing(self) -> _Plan:
        return _Plan(len(self._prospects), self._row_times, self._draft_times)


class _Plan:
    """Lengths that grow token by token, and what they are expected to give and to cost."""

    __slots__ = (
        "_depth",
        "_draft_times",
        "_num_requests",
        "_row_times",
        "_tokens",
        "_tries",
        "_unreached",
        "_variance",
        "rows",
    )

    def __init__(self, num_requests: int, row_times: RowTimes, draft_times: DraftTimes) -> None:
        self._row_times = row_times
        self._draft_times = draft_times
        self.rows = self._tokens = float(num_requests)
        self._num_requests = num_requests
        self._variance = 0.0
        self._tries = self._depth = 0.0  # tokens that the drafter computes for all requests; one after the other
        self._unreached: list[float] = []  # by position: chance that no request gets that far

    def add(self, prospect: Prospect, position: int) -> None:
        """A request is asked for one token more."""
        self.rows += prospect.rows[position + 1] - prospect.rows[position]
        self._variance += prospect.variance[position + 1] - prospect.variance[position]
        self._tokens += prospect.tokens[position + 1] - prospect.tokens[position]
        self._tries += prospect.reach[position]
        if position == len(self._unreached):
            self._unreached.append(1.0)
        before = self._unreached[position]
        self._unreached[position] = after = before * (1.0 - prospect.reach[position])
        self._depth += before - after

    @property
    def rate(self) -> float:
        """Committed tokens per time."""
        spread = min(math.sqrt(max(self._variance, 0.0)), self.rows - self._num_requests)
        step = 0.5 * (self._row_times.at(self.rows - spread) + self._row_times.at(self.rows + spread))
        return self._tokens / (step + self._draft_times.at(self._depth, self._tries))
