"""What drafting takes, learned from the steps that were run: once per step, by tokens in a row, and by tokens of all requests.

Counts the tokens that a drafter computed, not those it was asked for: it may end its drafts earlier. Knows no request and has no
clock: times are arguments, relative to a step. Invariant: no price is negative, and what was hardly observed costs nothing, so that
a drafter gets its chance.
"""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.98  # share of earlier observations that stays with each new one
TRACE = 1e-3  # of a step: what is counted beyond what was expected even if nothing was
IDLE_SURPRISE, SURPRISE = 1.5, 2.0  # an observation counts as at most this many times what was expected
IDLE_GAIN = 0.1
# Of one depth alone nobody can tell what is paid once and what for each token: then both are taken to be equal. Of one request
# alone, depth is the number of tokens: then the depth is to blame, so that drafting for many looks cheap, is tried, and is known.
RIDGE = (1e-3, 1e-3, 1e-2)
SWEEPS = 8
FIRST_OBSERVATIONS = 16  # after each of which prices are fitted; later only when somebody asks for them

Prices = tuple[
    float, float, float
]  # of a draft at all, for each token in a row (`depth`), for each token of all requests


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Prices of drafting as they are known now."""

    idle: float  # of keeping in step with the target, which some drafters do; part of what drafts cost
    prices: Prices

    def at(self, depth: float, tokens: float) -> float:
        """What it takes to draft `depth` tokens one after the other, `tokens` for all requests; both may be expectations."""
        if depth == 0:
            return 0.0  # who wants no drafts soon asks nobody (`DraftPolicy.rest`)
        once, per_depth, per_token = self.prices
        return self.idle + once + per_depth * depth + per_token * tokens


class DraftCost:
    """Prices fitted by least squares over decayed sums."""

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]  # of (1, depth, tokens) with itself
        self._sums = [0.0] * 3  # of (1, depth, tokens) with the times
        self._prices = [0.0] * 3
        self._idle: float | None = None
        self._observed = 0
        self._is_fitted = True

    def observe(self, depth: int, tokens: int, time: float) -> None:
        """Drafting `depth` tokens one after the other, `tokens` for all requests, took so long."""
        if depth == 0:
            self._observe_idle(time)
            return
        time = max(0.0, time - (self._idle or 0.0))
        expected = self._prices[0] + self._prices[1] * depth + self._prices[2] * tokens
        keep = KEEP
        if self._observed:
            keep *= (
                0.2 if time < 0.5 * expected else 1.0
            )  # interruptions lengthen: what is shorter is nearer to the truth
            time = min(time, SURPRISE * expected + TRACE)
        features = (1.0, float(depth), float(tokens))
        for row, left in enumerate(features):
            self._sums[row] = self._sums[row] * keep + left * time
            for column, right in enumerate(features):
                self._products[row][column] = self._products[row][column] * keep + left * right
        self._observed += 1
        self._is_fitted = False
        if self._observed < FIRST_OBSERVATIONS:
            self._fit()

    def times(self) -> DraftTimes:
        """Drafts cost nothing until they were observed twice."""
        if not self._is_fitted:
            self._fit()
        once, per_depth, per_token = self._prices if self._observed > 1 else (0.0, 0.0, 0.0)
        return DraftTimes(self._idle or 0.0, (once, per_depth, per_token))

    def _observe_idle(self, time: float) -> None:
        if self._idle is None or time < 0.5 * self._idle:
            self._idle = time
        else:
            self._idle += IDLE_GAIN * (min(time, IDLE_SURPRISE * self._idle + TRACE) - self._idle)

    def _fit(self) -> None:
        """A few sweeps over the normal equations, price by price, none below zero."""
        self._is_fitted = True
        for _ in range(SWEEPS):
            for row in range(3):
                others = sum(self._products[row][c] * self._prices[c] for c in range(3) if c != row)
                scale = self._products[row][row] * (1.0 + RIDGE[row])
                self._prices[row] = max(0.0, (self._sums[row] - others) / scale)
