"""The drafter `eagle`: a head over the target's hidden states, kept in step with it.

The head's entry for token p needs the target's state of token p - 1, which exists only right after the step that computed it. So
every call has the new states remembered; a draft, or a prompt that is read, takes them from there, and after a pause the head
catches up with what is left. Where a state is not known it is zero, as in training; guessed tokens are computed again with the
target's states once they are verified. Knows no kernels and sees no state: a `GuessingHead` keeps and computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from triblade.spec.draft_blocks import DraftBlocks
from triblade.spec.drafter import Draft, DraftItem, DraftState, ReceivedRows

WARM_UP_STEPS = 16  # whose states give back most of the acceptance that a pause costs


@dataclass(frozen=True, slots=True)
class GuessRun:
    """Committed tokens of one request from position `start` on, then `length` guesses."""

    request: DraftState
    start: int
    token_ids: list[int]
    length: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class GuessingHead(Protocol):
    """Computes a head; its keys and values lie in the blocks of the requests."""

    @property
    def num_requests(self) -> int:
        """Requests of which states are remembered."""
        ...

    def remember(self, items: Sequence[DraftItem]) -> Sequence[int]:
        """Keep the target's states of the tokens of its last step; for each item the first token whose state is kept."""
        ...

    def guess(self, runs: Sequence[GuessRun]) -> list[list[int]]:
        """The tokens that follow each run, aligned with the runs; fewer than asked for where a state is not finite.

        Takes the states of the tokens before those of the runs out of what is remembered.
        """
        ...

    def forget(self, request: int) -> None:
        """The request of this number ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits:
    """What a head can do.

    Attributes:
        max_tokens: most tokens in one call.
        window: tokens that its attention sees.
        context_length: positions it takes.
    """

    max_tokens: int
    window: int
    context_length: int


class EagleDrafter:
    """Implements `Drafter` with a trained head.

    Args:
        head: remembers and computes.
        block_size: tokens per block.
        limits: see there.
    """

    def __init__(self, head: GuessingHead, block_size: int, limits: HeadLimits) -> None:
        self._head = head
        self._limits = limits
        self._blocks = DraftBlocks(block_size)

    @property
    def warm_up_steps(self) -> int:
        """See `WarmsUp`."""
        return WARM_UP_STEPS

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return max(self._head.num_requests, self._blocks.num_requests)

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """See `Drafter`."""
        firsts = self._head.remember(items)
        runs = [self._run(item, first) for item, first in zip(items, firsts, strict=True)]
        guesses = iter(self._compute([run for run in runs if run is not None]))
        return [Draft(next(guesses) if run is not None else []) for run in runs]

    def forget(self, request: DraftState) -> None:
        """See `Drafter`."""
        self._blocks.forget(request)
        self._head.forget(request.number)

    def num_filled(self, request: DraftState) -> int:
        """See `FillsRows`."""
        return self._blocks.filled(request)

    def received(self, request: DraftState, rows: ReceivedRows) -> None:
        """See `FillsRows`; the states of these tokens stay unknown here."""
        self._blocks.received(request, rows)

    def _run(self, item: DraftItem, first: int) -> GuessRun | None:
        """What the head has not computed of a request, then guesses; None: nothing to do.

        The newest token is computed where guesses follow it; only then it has a slot for sure. Tokens that no later one of this
        request sees are left out if their states, which are known from token `first` on, are lost.
        """
        if not _is_due(item):
            return None
        request, limits = item.request, self._limits
        room = min(limits.context_length, len(request.block_table) * self._blocks.block_size)
        length = max(0, min(item.length, room - item.stop))
        stop = item.stop + 1 if length > 0 else item.stop
        start = self._blocks.advance(request, item.stop)
        start = max(start, min(first + 1, stop - limits.window))
        return GuessRun(request, start, request.token_ids[start:stop], length) if start < stop else None

    def _compute(self, runs: list[GuessRun]) -> list[list[int]]:
        found: list[list[int]] = []
        for part in self._parts(runs):
            for run in part:
                end = run.start + run.num_tokens
                self._blocks.will_write(run.request, run.start, end + max(0, run.length - 1))
            guesses = self._head.guess(part)
            for run in part:
                self._blocks.computed(run.request, run.start + run.num_tokens)
            # The first of a run that was cut only brings the head forward.
            found += [tokens for run, tokens in zip(part, guesses, strict=True) if run.length >= 0]
        return found

    def _parts(self, runs: list[GuessRun]) -> Iterator[list[GuessRun]]:
        """Runs in parts of at most `max_tokens` tokens; longer ones are cut, their leading pieces with length -1."""
        if sum(run.num_tokens for run in runs) <= self._limits.max_tokens:
            yield from [runs] if runs else []
            return
        part, room = list[GuessRun](), self._limits.max_tokens
        for run in runs:
            for piece in _cut(run, self._limits.max_tokens):
                if piece.num_tokens > room:
                    yield part
                    part, room = [], self._limits.max_tokens
                part.append(piece)
                room -= piece.num_tokens
        if part:
            yield part


def _is_due(item: DraftItem) -> bool:
    """Whether the head is to compute: for a draft, or because a prompt is read, whose blocks others may share."""
    return item.length > 0 or item.is_chunk or item.stop - item.start > 1


def _cut(run: GuessRun, size: int) -> Iterator[GuessRun]:
    for at in range(0, run.num_tokens, size):
        is_last = at + size >= run.num_tokens
        yield GuessRun(run.request, run.start + at, run.token_ids[at : at + size], run.length if is_last else -1)
