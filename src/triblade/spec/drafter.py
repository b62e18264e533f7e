"""The seam between an engine and whoever proposes tokens: `propose` after every step, `forget` when a request ends.

A drafter never decides a token, so it can be wrong but cannot lie: the target verifies every proposal (`spec.sampler` for one
row, `engine.runner` for a run of them). Knows no scheduler and no target; what it must know of a request is `DraftState`.

What is known at a call: a request that decodes has tokens [0, stop], of which the newest has no KV yet; in a chunk of a prompt the
tokens beyond `stop` are known too. A preempted request comes back with a smaller `start`; a cached prefix lets it jump ahead.
Items and drafts are named tuples for the same reason as `spec.outcomes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
    """A request after a step.

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
