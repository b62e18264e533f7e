"""The drafter `eagle`: a head over the target's hidden states, kept in step with it.

The head's entry for token p needs the target's state of token p - 1, which exists only right after the step that computed it. So
every call hands the new states on: to the head at once where a draft is wanted or a prompt is read, otherwise to a short memory,
from which the head catches up when drafts are wanted again. Where a state is not known it is zero, as in training; guessed tokens
are computed again with the target's states once they are verified. Knows no kernels: a `GuessingHead` computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triblade.spec.draft_blocks import DraftBlocks
from triblade.spec.drafter import Draft, DraftItem, DraftState


@dataclass(frozen=True, slots=True)
class GuessRun:
    """Committed tokens of one request from position `start` on, then `length` guesses.

    Attributes:
        states: float32 [T, F * C]; row i belongs to the token before token i of the run.
    """

    request: DraftState
    start: int
    token_ids: list[int]
    states: Tensor
    length: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class GuessingHead(Protocol):
    """Computes a head; its keys and values lie in the blocks of the requests."""

    def guess(self, runs: Sequence[GuessRun]) -> list[list[int]]:
        """The tokens that follow each run, aligned with the runs; fewer than asked for where a state is not finite."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits:
    """What a head can do.

    Attributes:
        max_tokens: most tokens in one call.
        window: tokens that its attention sees.
        state_size: F * C.
        context_length: positions it takes.
    """

    max_tokens: int
    window: int
    state_size: int
    context_length: int


class _Memory:
    """States that the head has not seen yet: rows belong to the tokens before `start`, `start` + 1, ..., before `stop`."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self._parts = deque[Tensor]()  # [N, F * C] each

    def add(self, rows: Tensor, window: int) -> None:
        """Append rows [N, F * C]; the oldest go while `window` newer ones are there."""
        self._parts.append(rows)
        self.stop += len(rows)
        while self.stop - self.start - len(self._parts[0]) >= window:
            self.start += len(self._parts.popleft())

    def drop(self, stop: int) -> None:
        """Forget the states before tokens up to `stop`."""
        while self._parts and self.start + len(self._parts[0]) <= stop:
            self.start += len(self._parts.popleft())
        if self._parts and self.start < stop:
            self._parts[0] = self._parts[0][stop - self.start :]
        self.start = max(self.start, stop)

    def rows(self, start: int, stop: int, state_size: int) -> Tensor:
        """States before tokens [start, stop), zero where they are not known: [N, F * C]."""
        found = torch.zeros(stop - start, state_size)
        at = self.start
        for part in self._parts:
            first, last = max(at, start), min(at + len(part), stop)
            if first < last:
                found[first - start : last - start] = part[first - at : last - at]
            at += len(part)
        return found


class EagleDrafter:
    """Implements `Drafter` with a trained head.

    Args:
        head: computes.
        states: the target's states float32 [R, F * C] of rows of its last step.
        block_size: tokens per block.
        limits: see there.
    """

    def __init__(
        self, head: GuessingHead, states: Callable[[Sequence[int]], Tensor], block_size: int, limits: HeadLimits
    ) -> None:
        self._head = head
        self._states = states
        self._limits = limits
        self._blocks = DraftBlocks(block_size)
        self._memories: dict[int, _Memory] = {}  # by number of the request

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return len({*self._memories, *self._blocks.numbers})

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """See `Drafter`."""
        self._remember(items)
        runs = [self._run(item) for item in items]
        guesses = iter(self._compute([run for run in runs if run is not None]))
        return [Draft(next(guesses) if run is not None else []) for run in runs]

    def forget(self, request: DraftState) -> None:
        """See `Drafter`."""
        self._blocks.forget(request)
        self._memories.pop(request.number, None)

    def _remember(self, items: Sequence[DraftItem]) -> None:
        """Add the states of this step to the memories, the newest `window` of each."""
        sizes = [item.stop - item.start for item in items]
        rows = [
            row for item, size in zip(items, sizes, strict=True) for row in range(item.first_row, item.first_row + size)
        ]
        for item, states in zip(items, self._states(rows).split(sizes), strict=True):
            memory = self._memories.get(item.request.number)
            if memory is None or memory.stop != item.start + 1:
                memory = self._memories[item.request.number] = _Memory(item.start + 1)
            memory.add(states, self._limits.window)

    def _run(self, item: DraftItem) -> GuessRun | None:
        """What the head has not computed of a request, then guesses; None: nothing to do.

        The newest token is computed where guesses follow it; only then it has a slot for sure. Tokens that no later one of this
        request sees are left out if their states are lost.
        """
        if not _is_due(item):
            return None
        request, limits, memory = item.request, self._limits, self._memories[item.request.number]
        room = min(limits.context_length, len(request.block_table) * self._blocks.block_size)
        length = max(0, min(item.length, room - item.stop))
        stop = item.stop + 1 if length > 0 else item.stop
        start = self._blocks.advance(request, item.stop)
        start = max(start, min(memory.start, stop - limits.window))
        states = memory.rows(start, max(start, stop), limits.state_size)
        memory.drop(stop)
        return GuessRun(request, start, request.token_ids[start:stop], states, length) if start < stop else None

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
    return item.length > 0 or item.stop + 1 < len(item.request.token_ids) or item.stop - item.start > 1


def _cut(run: GuessRun, size: int) -> Iterator[GuessRun]:
    for at in range(0, run.num_tokens, size):
        is_last = at + size >= run.num_tokens
        tokens, states = run.token_ids[at : at + size], run.states[at : at + size]
        yield GuessRun(run.request, run.start + at, tokens, states, run.length if is_last else -1)
