"""The seam between an engine and whoever proposes tokens: `propose` after every step, `forget` when a request ends.

A drafter never decides a token, so it can be wrong but cannot lie: the target verifies every proposal (`spec.sampler` for one
row, `engine.runner` for a run of them). Knows no scheduler and no target; what it must know of a request is `DraftState`.

What is known at a call: a request that decodes has tokens [0, stop], of which the newest has no KV yet; in a chunk of a prompt the
tokens beyond `stop` are known too, and a prompt that is computed for others ends at `stop`. A preempted request comes back with a
smaller `start`; a cached prefix lets it jump ahead. Items and drafts are named tuples for the same reason as `spec.outcomes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from triblade.sampling_params import SamplingParams


class DraftState(Protocol):
    """A request as a drafter sees it; only committed tokens."""

    number: int  # unique
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    token_ids: list[int]  # prompt and output
    params: SamplingParams
    seed: int
    block_table: array[int]


class DraftItem(NamedTuple):
    """A request after a step; see the top of this file for what is known of it.

    Attributes:
        request: whose continuation is wanted.
        start: first token whose KV the target computed in this step.
        stop: end of those that are committed; its KV covers tokens [0, stop) now.
        first_row: row of token `start` among the target's hidden states of this step.
        length: most tokens to propose; 0: only keep in step. Blocks for their KV are reserved.
    """

    request: DraftState
    start: int
    stop: int
    first_row: int
    length: int

    @property
    def is_chunk(self) -> bool:
        """Whether it is part of a prompt that is read, or of a preempted request; else the newest token alone has no KV."""
        return self.stop + 1 < len(self.request.token_ids) or not self.request.output_token_ids


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """Rows of tokens [start, stop), which begin a block; the drafter's part is right in those before `filled`."""

    start: int
    filled: int
    stop: int


class Draft(NamedTuple):
    """A proposed continuation, at most as long as asked for.

    Attributes:
        token_ids: the tokens; may be empty.
        weights: integer weights (see `spec.distribution`) float32 [k, V] that each token was drawn from, columns of the target's
            vocabulary; None: the proposal is certain, as if drawn from a distribution of one token.
    """

    token_ids: list[int]
    weights: Tensor | None = None


class Drafter(Protocol):
    """Proposes continuations."""

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """One draft per item. Called once after every step, with all its requests that go on."""
        ...

    def forget(self, request: DraftState) -> None:
        """The request ended; also called for requests that never decoded."""
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """A drafter that knows less after steps in which it was not called, until it was called in some again."""

    @property
    def warm_up_steps(self) -> int:
        """After so many, drafts are nearly as good as ever."""
        ...


@runtime_checkable
class FillsRows(Protocol):
    """A drafter with keys and values of its own in the rows of its target, which may come from another worker."""

    def num_filled(self, request: DraftState) -> int:
        """Leading tokens of the request whose keys and values are in its blocks."""
        ...

    def received(self, request: DraftState, rows: ReceivedRows) -> None:
        """Whole rows came from elsewhere into the request's blocks."""
        ...
