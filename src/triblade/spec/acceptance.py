"""How often drafts are accepted, position by position: decayed counts of one request, with everybody's counts as their prior.

Knows no tokens, no drafter and no time. Invariant: an estimate lies strictly between 0 and 1, and without any count it is what the
estimate one position earlier suggests, so that a longer draft than ever tried is judged by the shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence

EDGE = 0.01  # no estimate is surer than this: one surprise must be able to move it


class PositionCounts:
    """Decayed counts of trials and successes by position in a draft.

    Args:
        length: positions.
        keep: share of the old counts of a position that stays when it is tried again; 1 / (1 - keep) trials are remembered.
    """

    __slots__ = ("_hits", "_keep", "_trials")

    def __init__(self, length: int, keep: float) -> None:
        self._keep = keep
        self._trials = [0.0] * length
        self._hits = [0.0] * length

    def observe(self, tried: int, hits: int) -> None:
        """`tried` positions stood in a row; the first `hits` succeeded, the next one (if any) failed, the rest was not judged.

        What was not judged fades like the others: when the first position fails again and again, it is of no use to remember
        that the third one once did well behind it.
        """
        if not tried:
            return
        keep, tried = self._keep, min(tried, len(self._trials))
        self._trials[:tried] = [keep * count for count in self._trials[:tried]]
        self._hits[:tried] = [keep * count for count in self._hits[:tried]]
        for position in range(min(hits, tried)):
            self._trials[position] += 1.0
            self._hits[position] += 1.0
        if hits < tried:
            self._trials[hits] += 1.0

    def fade(self, keep: float) -> None:
        """Nothing was tried for a while: a share of the counts is forgotten, and estimates go back to where they began."""
        self._trials = [keep * count for count in self._trials]
        self._hits = [keep * count for count in self._hits]

    def estimates(self, base: Sequence[float], weight: float) -> list[float]:
        """Chance of each position, given that all before it succeeded.

        The prior of a position counts as `weight` trials. It is `base` there, moved by as much as the position before turned
        out to differ from its own base.
        """
        estimates = []
        shift = 0.0
        for position, expected in enumerate(base):
            prior = min(max(expected + shift, EDGE), 1.0 - EDGE)
            estimate = (self._hits[position] + weight * prior) / (self._trials[position] + weight)
            estimates.append(estimate)
            shift = estimate - expected
        return estimates
