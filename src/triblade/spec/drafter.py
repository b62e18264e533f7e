"""What a drafter is: it proposes how requests may go on, and the target verifies.

A drafter never decides a token. Knows no engine: a request is whatever has the fields of `DraftState`. Invariant: only committed
tokens reach a drafter, so a rejected proposal needs no undoing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from triblade.sampling_params import SamplingParams


class DraftState(Protocol):
    """One request, as a drafter sees it."""

    number: int  # unique
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    token_ids: list[int]  # prompt and output, committed only
    params: SamplingParams
    seed: int
    block_table: array[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed continuation."""

    token_ids: list[int]  # at most `DraftItem.length`, may be empty
    weights: Tensor | None = (
        None  # [k, V] float32 integer weights each token was drawn from; None: the proposal is certain
    )


@dataclass(frozen=True, slots=True)
class DraftItem:
    """One request after a step."""

    request: DraftState
    start: int
    stop: int  # [start, stop): tokens whose KV the target has just computed and that are committed
    first_row: int  # row of token `start` among the target's hidden states of this step
    length: int  # most tokens to propose; 0: only keep in step


class Drafter(Protocol):
    """Proposes continuations."""

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """One draft per item; called once after every step with all its unfinished requests."""
        ...

    def forget(self, request: DraftState) -> None:
        """The request ended."""
        ...
