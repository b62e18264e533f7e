"""What became of drafts: counts of one choice or of a whole engine, and the trace of a choice, step by step.

Counts tokens that were committed and nothing else. Every step commits one token of its own; those beyond it are the accepted ones,
so a draft token that ends its request is the step's own. Invariant: the tokens of an answer are the steps that gave some, plus the
accepted tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

PLAIN_STEP = (0, 0)  # in a trace


@dataclass(slots=True)
class SpeculationCounts:
    """Counts over steps that committed tokens, once per request and step; lists are by position in a draft."""

    num_steps: int = 0
    num_drafts: int = 0  # steps with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """A step verified `drafted` tokens of a request and committed `accepted` of them beside its own token."""
        self.num_steps += 1
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = drafted - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for position in range(drafted):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @property
    def mean_accepted_length(self) -> float | None:
        """Mean tokens of a step with a draft, its own included; None without any."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def snapshot(self) -> SpeculationCounts:
        """A copy that stays as it is."""
        return copy.deepcopy(self)


@dataclass(slots=True)
class Speculation:
    """Drafting for one choice.

    Attributes:
        trace: drafted and accepted tokens of each step that gave tokens; their sum plus one per step is the answer's length.
        spent_s: time of steps for which it is known what they would have taken without drafts.
        plain_s: that time, for as many tokens.
    """

    trace: list[tuple[int, int]] = field(default_factory=list)
    spent_s: float = 0.0
    plain_s: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """A step committed a token of its own and `accepted` of `drafted` tokens."""
        self.trace.append((drafted, accepted))

    @property
    def counts(self) -> SpeculationCounts:
        """Over all its steps."""
        counts = SpeculationCounts()
        for drafted, accepted in self.trace:
            counts.add(drafted, accepted)
        return counts

    def as_json(self) -> dict[str, Any]:
        """All of it under stable names, for answers and reports."""
        counts = self.counts
        return {
            "num_steps": counts.num_steps,
            "num_drafts": counts.num_drafts,
            "num_draft_tokens": counts.num_draft_tokens,
            "num_accepted_tokens": counts.num_accepted_tokens,
            "draft_tokens_per_position": counts.drafted_per_position,
            "accepted_tokens_per_position": counts.accepted_per_position,
            "mean_accepted_length": counts.mean_accepted_length,
            "estimated_speedup": self.speedup,
            "trace": [list(step) for step in self.trace],
        }

    @property
    def speedup(self) -> float | None:
        """Estimated time per token without drafts, over that with them; None while nothing is known."""
        return self.plain_s / self.spent_s if self.spent_s > 0 else None
