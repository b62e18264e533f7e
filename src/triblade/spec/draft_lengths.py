"""Draft lengths for the requests of a step, as a search for the highest rate of tokens.

Knows no history, no step and no clock: what drafts promise and what things cost are given. Invariant: what is found is never worse
than drafting nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triblade.spec.draft_cost import DraftTimes
from triblade.spec.step_cost import RowTimes

NEGLIGIBLE = 0.02  # a token less likely than this is not worth the thought


@dataclass(frozen=True, slots=True)
class Prospect:
    """What drafts of a request promise."""

    likelihood: list[float]  # by position: that it is accepted, if it is offered; falls from one to the next
    rows: list[float]  # by length, from 0: expected rows of the step
    tokens: list[float]  # by length, from 0: expected tokens of the step

    @classmethod
    def of(cls, accepted: Sequence[float], offered: Sequence[float]) -> Prospect:
        """From the chance of each position to be accepted, and to be offered, if those before it were."""
        likelihood, rows, tokens = list[float](), [1.0], [1.0]
        chance = reach = 1.0
        for accept, offer in zip(accepted, offered, strict=True):
            chance *= accept
            reach *= offer
            likelihood.append(chance)
            rows.append(rows[-1] + reach)
            tokens.append(tokens[-1] + chance * reach)
        return cls(likelihood, rows, tokens)


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
        rows = tokens = 0.0
        depth = asked = 0
        for prospect, wanted in zip(self._prospects, lengths, strict=True):
            length = min(wanted, len(prospect.likelihood))
            rows += prospect.rows[length]
            tokens += prospect.tokens[length]
            depth = max(depth, length)
            asked += length
        return tokens / (self._row_times.at(rows) + self._draft_times.at(depth, asked))

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
        rows = tokens = float(len(self._prospects))
        best_rate, best_count, depth = 0.0, 0, 0
        for count, (index, position) in enumerate(steps, 1):
            prospect = self._prospects[index]
            rows += prospect.rows[position + 1] - prospect.rows[position]
            tokens += prospect.tokens[position + 1] - prospect.tokens[position]
            if rows > most_rows:
                break
            depth = max(depth, position + 1)
            rate = tokens / (self._row_times.at(rows) + self._draft_times.at(depth, count))
            if rate > best_rate:
                best_rate, best_count = rate, count
        return best_rate, [index for index, _ in steps[:best_count]]
