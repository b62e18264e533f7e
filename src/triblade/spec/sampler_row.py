"""One row of logits as the sampler sees it: a position of one choice with the tokens before it.

Rows know nothing of each other. Several rows may belong to one choice: with speculation each carries its own
hypothetical prefix, and everything that depends on history (penalties, bad words, min_tokens) follows that prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from triblade.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft's token for one row, drawn from integer weights [V] (see `spec.distribution`)."""

    token_id: int
    weights: Tensor


@dataclass(slots=True)
class SamplerRow:
    """What must be known to turn one row of logits into a token."""

    params: SamplingParams
    seed: int  # of this choice, derived from (request seed, choice index)
    position: int  # number of output tokens before this one
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # before this position
    stop_token_ids: frozenset[int]  # barred until `min_tokens` tokens exist
    bad_words: Sequence[Sequence[int]] = ()  # `params.bad_words` as token ids
    proposal: Proposal | None = (
        None  # of a draft that was drawn; a row that is not greedy keeps it by rejection sampling
    )
    allowed: Tensor | None = (
        None  # a mask (see `spec.token_mask`): what a `TokenConstraint` lets come here; None: everything
    )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the largest raw logit decides and nothing else is wanted."""
        return self.params.is_greedy and self.params.logprobs is None and self.is_plain

    @property
    def is_plain_draw(self) -> bool:
        """Whether the token is drawn from all tokens by temperature and min_p alone, and nothing else is wanted."""
        return not self.params.is_greedy and self.is_simple and self.allowed is None

    @property
    def is_simple(self) -> bool:
        """Whether the token is the best one, or drawn by temperature and min_p alone, among all or those that are allowed."""
        params = self.params
        is_whole = params.is_greedy or (params.top_k <= 0 and params.top_p >= 1.0 and self.proposal is None)
        return is_whole and params.logprobs is None and self._is_unbiased

    @property
    def is_plain(self) -> bool:
        """Whether the logits stay as they are: no bias, no penalty, nothing barred."""
        return self.allowed is None and self._is_unbiased

    @property
    def _is_unbiased(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty == 1.0
            and params.presence_penalty == 0.0
            and params.frequency_penalty == 0.0
            and params.allowed_token_ids is None
            and not params.logit_bias
            and not self.bad_words
            and self.position >= params.min_tokens
        )
