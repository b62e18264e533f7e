"""A request: its tokens, how many of them have KV, and where that KV is.

One object per choice (`n` choices are `n` requests). Tokens chase tokens: `num_computed_tokens` runs after `num_tokens`; prefill,
decode, cache hits and preemption are all the distance between the two. Knows no tensor; the scheduler moves it, the engine
appends to it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from triblade.engine.block_pool import CachedBlock
from triblade.engine.outputs import FinishReason
from triblade.sampling_params import SamplingParams
from triblade.spec.constraint import TokenConstraint
from triblade.spec.record import Speculation


class Status(Enum):
    """Where a request stands. A preempted one is waiting again."""

    WAITING = auto()
    WAITING_FOR_KV = auto()  # its blocks are reserved, and somebody else computes what belongs into them
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One choice of one client request. Set by the engine unless a comment says otherwise."""

    request_id: str  # the client's label; need not be unique
    number: int  # unique and ascending; the order of arrival
    index: int = 0  # which choice
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # of this choice
    max_tokens: int  # resolved against the context length
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    constraint: TokenConstraint | None = None  # stands behind the output tokens, whatever happens to their blocks
    priority: int = 0  # lower is served first
    leader: Request | None = None  # the first of `n` choices; the others wait until its prompt is cached
    arrival_s: float = 0.0  # monotonic clock
    first_scheduled_s: float | None = None  # scheduler

    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)  # proposed, not yet verified
    draft_weights: Any = None  # see `spec.drafter.Draft.weights`
    speculation: Speculation | None = None  # what became of its drafts; None where none are made
    token_ids: list[int] = field(default_factory=list)  # prompt and output

    status: Status = Status.WAITING  # scheduler
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0  # scheduler; tokens whose KV is in `block_table`
    num_cached_tokens: int = 0  # scheduler; prompt tokens found in the prefix cache when first scheduled
    num_preemptions: int = 0  # scheduler
    num_fetches: int = 0  # scheduler; times that its rows were asked for elsewhere
    keeps_blocks: bool = False  # its blocks outlive it, until `Engine.let_go`
    # scheduler; ids of its blocks in order, int32 because native code reads them as they are
    block_table: array[int] = field(default_factory=lambda: array("i"))
    published: list[CachedBlock] = field(default_factory=list)  # scheduler; one per leading full block

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute until the next one can be sampled, drafts included."""
        return len(self.token_ids) + len(self.draft_token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the last known token lacks KV: one token (plus drafts) would not lead to a sample yet."""
        return self.num_computed_tokens < len(self.token_ids) - 1

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt log-probabilities and means need the states of every prompt token, which a cached block does not have."""
        return self.params.prompt_logprobs is None and self.params.pooling != "mean"

    @property
    def order(self) -> tuple[int, int]:
        """Served in this order; preempted in the reverse."""
        return (self.priority, self.number)

    def propose(self, token_ids: list[int], weights: Any = None) -> None:
        """Replace the draft."""
        self.draft_token_ids, self.draft_weights = token_ids, weights

    def append(self, token_id: int) -> None:
        """Commit an output token."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
