"""What a draft policy is asked about, and told afterwards: requests that decode, and what became of their drafts.

Numbers only: no token, no tensor, no clock. Named tuples, because each step makes one or two for every request, and a frozen
dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A request that decodes in the next step."""

    number: int
    num_prompt_tokens: int
    room: int  # tokens it may still get; a step with k drafts commits up to k + 1


class Verified(NamedTuple):
    """What became of the drafts of one request in one step."""

    number: int
    asked: int  # what `lengths` said
    proposed: int  # what the drafter offered of it; 0 is no verdict on its quality
    accepted: int  # of these, and committed
    is_last: bool = False  # the request ended with this step: what it did not accept was not judged

    @property
    def tries(self) -> int:
        """Tokens that the drafter computed: those it offered, and the one behind them of which it was too unsure."""
        return min(self.asked, self.proposed + 1)

    @property
    def judged(self) -> int:
        """Tokens that were right or wrong, the first wrong one and those behind it included."""
        return self.accepted if self.is_last else self.proposed


class StepRecord(NamedTuple):
    """One step: its decoding requests, its rows, and its times."""

    verified: Sequence[Verified]
    rows: int  # tokens computed, chunks of prompts included
    target_s: float
    draft_s: float | None  # for proposing what this step verified; None where it took other work, too

    @property
    def is_decode_only(self) -> bool:
        """Chunks of prompts cost otherwise than rows that are verified."""
        return self.rows == sum(1 + each.proposed for each in self.verified)
