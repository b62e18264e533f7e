"""The eagle head as drafter: after every step it reads the target's hidden states, and guesses on with its own.

    target computed   [start ......... stop)                         hidden states of these tokens are there, of no others
    head computes     [frontier ....... stop]  then  stop + 1, ...   entry p from token p and the hidden state of token p - 1
                       catch-up, true states         guesses, from the head's own states

A committed token's entry is always computed from the target's state, also where the guess was right, so the head's KV is that of
its training. What is not known is zero: the state before a cached prefix's end, in blocks of a step that nobody told of, and at the
end of a block behind which a request that wanted no draft had none yet. Proposals are certain: the likeliest tokens. Knows no
target, no cache and no scheduler; `HeadExecutor` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triblade.spec.draft_blocks import DraftBlocks
from triblade.spec.draft_model import DraftTokens
from triblade.spec.drafter import Draft, DraftItem, DraftState

UNKNOWN = -1  # instead of a row: the hidden state is not known


class HeadExecutor(Protocol):
    """Computes the head over the blocks of the requests. Runs of equal length stand together; rows follow the runs."""

    def catch_up(self, runs: Sequence[DraftTokens], rows: Sequence[int]) -> None:
        """Compute tokens; `rows` holds for each the row of the token before it in the target's last step, or UNKNOWN."""
        ...

    def extend(self, runs: Sequence[DraftTokens], rows: Sequence[int]) -> None:
        """Compute tokens; `rows` holds for each the row of the token before it in the head's own last call."""
        ...

    def best(self, rows: Sequence[int]) -> list[int]:
        """The likeliest next token of rows of the head's last call; -1 for a row that is not finite."""
        ...


@dataclass(slots=True)
class _Run:
    """What an item needs computed, and what it is offered."""

    item: DraftItem
    tokens: DraftTokens
    length: int  # most tokens to propose
    proposed: list[int] = field(default_factory=list)

    def rows(self) -> list[int]:
        """For each token, where the target's state of the token before it is."""
        item, tokens = self.item, self.tokens
        befores = range(tokens.start - 1, tokens.stop - 1)
        return [item.first_row + p - item.start if p >= item.start else UNKNOWN for p in befores]


class EagleDrafter:
    """Implements `Drafter` with an eagle head.

    Args:
        executor: computes the head; its cache has the block ids of the target's.
        block_size: tokens per block.
        context_length: positions that the head can compute.
        max_tokens: most tokens of one call of the executor.
    """

    def __init__(self, executor: HeadExecutor, block_size: int, context_length: int, max_tokens: int) -> None:
        self._executor = executor
        self._context_length = context_length
        self._max_tokens = max_tokens
        self._blocks = DraftBlocks(block_size)

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return self._blocks.num_requests

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """See `Drafter`."""
        runs = [self._run(item) for item in items]
        growing, rows = self._catch_up(runs)
        while growing:
            growing = self._offer(growing, rows)
            rows = self._extend(growing, rows) if growing else []
        return [Draft(run.proposed) for run in runs]

    def forget(self, request: DraftState) -> None:
        """See `Drafter`."""
        self._blocks.forget(request)

    def _run(self, item: DraftItem) -> _Run:
        """From the frontier up to and including token `stop`, where it is known and has a slot."""
        request = item.request
        last = min(self._context_length, len(request.block_table) * self._blocks.block_size)
        stop = min(item.stop + 1, len(request.token_ids), last)
        start = self._blocks.advance(request, item.stop)
        wanted = min(item.length, last - item.stop) if stop > item.stop else 0
        return _Run(item, DraftTokens(request, start, request.token_ids[start:stop]), max(0, wanted))

    def _catch_up(self, runs: list[_Run]) -> tuple[list[_Run], list[int]]:
        """Compute what is missing; the runs that want a draft and were in the last call, and the rows of their last tokens."""
        ordered = sorted((run for run in runs if run.tokens.num_tokens), key=lambda run: run.tokens.num_tokens)
        last, room = list[_Run](), self._max_tokens
        for run in ordered:  # who wants a draft comes last, as long as all of them fit into one call
            if run.length and run.tokens.num_tokens <= room:
                last.append(run)
                room -= run.tokens.num_tokens
        drafting = {id(run) for run in last}
        for run in ordered:
            if id(run) not in drafting:
                self._compute_alone(run)
        if last:
            self._compute(last)
        ends, row = list[int](), -1
        for run in last:
            row += run.tokens.num_tokens
            ends.append(row)
        return last, ends

    def _compute_alone(self, run: _Run) -> None:
        """A run of any length, a piece at a time."""
        tokens = run.tokens
        for begin in range(0, tokens.num_tokens, self._max_tokens):
            piece = tokens.token_ids[begin : begin + self._max_tokens]
            self._compute([_Run(run.item, DraftTokens(tokens.request, tokens.start + begin, piece), 0)])

    def _compute(self, runs: list[_Run]) -> None:
        for run in runs:
            self._blocks.will_write(run.tokens.request, run.tokens.start, run.tokens.stop)
        self._executor.catch_up([run.tokens for run in runs], [row for run in runs for row in run.rows()])
        for run in runs:
            self._blocks.computed(run.tokens.request, run.tokens.stop)

    def _offer(self, growing: list[_Run], rows: list[int]) -> list[_Run]:
        """Add a token to each; those that want another. `rows` keeps the rows of these."""
        best = self._executor.best(rows)
        going_on = []
        for number, (run, token) in enumerate(zip(growing, best, strict=True)):
            if token >= 0:
                run.proposed.append(token)
                if len(run.proposed) < run.length:
                    going_on.append(number)
        rows[:] = [rows[number] for number in going_on]
        return [growing[number] for number in going_on]

    def _extend(self, growing: list[_Run], rows: list[int]) -> list[int]:
        """Compute the token that each was offered last; their rows."""
        runs = []
        for run in growing:
            position = run.item.stop + len(run.proposed)
            self._blocks.will_write(run.item.request, position, position + 1)
            runs.append(DraftTokens(run.item.request, position, run.proposed[-1:]))
        self._executor.extend(runs, rows)
        return list(range(len(runs)))
