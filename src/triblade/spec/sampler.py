"""Logits in, tokens out: greedy choice or a draw, with log-probabilities.

Knows no model and no request, only rows (`SamplerRow`). A row's token is a function of its logits, its row and
nothing else: not of the batch, not of the order, not of what was drawn before. Columns beyond the vocabulary
(padding rows of an embedding) are cut off first and exist for nobody.

Verifying a draft is sampling a row for each of its positions and keeping them while they agree with it:

* A proposal that is certain (greedy, or found in a text) is a draw from one point x. Rejection sampling keeps it with
  probability p(x), and else draws from p without x. Drawing y from p and comparing it with x is just that; the token is the
  one that plain decoding would have drawn, seed for seed.
* A proposal x drawn from q is kept with probability min(1, p(x) / q(x)), and else replaced by a draw from max(0, p - q)
  (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, section 2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triblade.sampling_params import TokenLogprobs
from triblade.spec.distribution import draw, filtered_weights, total_weight
from triblade.spec.logits import process_logits
from triblade.spec.logprobs import token_logprobs
from triblade.spec.random_numbers import child_seed, uniform
from triblade.spec.rejection import keep_or_replace
from triblade.spec.sampler_row import Proposal, SamplerRow

__all__ = ["Proposal", "Sampled", "Sampler", "SamplerRow", "best_tokens", "child_seed", "uniform"]

CELLS_AT_ONCE = 2**23  # weights made together; bounds the memory of a step with a large vocabulary


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row; its log-probabilities where the row asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Turns logits into tokens.

    Args:
        vocab_size: number of tokens that may be chosen: the tokenizer's length, at most the columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def process(self, logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """Bias, penalties and bars of each row applied to float32 logits [R, C]: [R, V], -inf where barred, C >= V.

        The argument is not changed, but the result may be a view of it. See `triblade.spec.logits` for the order,
        and for what happens when everything is barred.
        """
        return process_logits(self._real(logits), rows)

    def probabilities(self, processed: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
        """The distributions that `sample` draws from, float32 [R, V], of processed logits; one-hot for greedy rows."""
        result = torch.zeros_like(processed)
        result.scatter_(-1, processed.argmax(-1, keepdim=True), 1.0)
        for part in self._random_parts(rows):
            index = torch.tensor(part).to(processed.device)
            weights = filtered_weights(processed[index], [rows[number].params for number in part])
            result[index] = (weights / total_weight(weights).double()).float()
        return result

    def sample(self, logits: Tensor, rows: Sequence[SamplerRow], best: Sequence[int] | None = None) -> Sampled:
        """Choose a token for each row of float32 logits [R, C].

        Greedy rows take the largest logit, the smallest id among equals. A row that is not finite (see
        `best_tokens`) gets some token of the vocabulary and disturbs no other. `best`, where it is known
        already, is `best_tokens` of the logits and saves looking for it again.
        """
        if best is not None and all(row.is_plain and row.params.is_greedy for row in rows):
            return Sampled(list(best), self._asked_logprobs(logits, rows, best))
        processed = self.process(logits, rows)
        chosen = processed.argmax(-1)  # [R]
        for part in self._random_parts(rows):
            index = torch.tensor(part).to(chosen.device)
            chosen[index] = _draw_rows(processed[index], [rows[number] for number in part])
        token_ids: list[int] = chosen.tolist()
        return Sampled(token_ids, self._asked_logprobs(logits, rows, token_ids))

    def logprobs(self, logits: Tensor, token_ids: Sequence[int], numbers: Sequence[int]) -> list[TokenLogprobs]:
        """Score given tokens by raw float32 logits [R, C], with `numbers` alternatives each.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        return token_logprobs(self._real(logits), token_ids, numbers)

    def _real(self, logits: Tensor) -> Tensor:
        return logits[:, : self.vocab_size]

    def _random_parts(self, rows: Sequence[SamplerRow]) -> list[list[int]]:
        """Numbers of the rows that are not greedy, in pieces of bounded memory."""
        numbers = [number for number, row in enumerate(rows) if not row.params.is_greedy]
        step = max(1, CELLS_AT_ONCE // self.vocab_size)
        return [numbers[start : start + step] for start in range(0, len(numbers), step)]

    def _asked_logprobs(
        self, logits: Tensor, rows: Sequence[SamplerRow], token_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(rows)
        asked = {number: row.params.logprobs for number, row in enumerate(rows) if row.params.logprobs is not None}
        if asked:
            index = torch.tensor(list(asked)).to(logits.device)
            scored = self.logprobs(logits[index], [token_ids[number] for number in asked], list(asked.values()))
            for number, logprobs in zip(asked, scored, strict=True):
                result[number] = logprobs
        return result


def best_tokens(logits: Tensor) -> list[int]:
    """Of each row of raw logits [R, V] the token with the largest, the smallest id among equals.

    A row with NaN or an infinity, which is a fault of the model, gives -1.
    """
    # Both extremes carry a NaN on; two such passes are much cheaper than `isfinite` over everything.
    finite = logits.amin(-1).isfinite() & logits.amax(-1).isfinite()
    best: list[int] = logits.argmax(-1).where(finite, -1).tolist()
    return best


def _draw_rows(processed: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Token ids [R] of rows that are not greedy, from processed logits [R, V]."""
    weights = filtered_weights(processed, [row.params for row in rows])
    uniforms = [uniform(row.seed, row.position) for row in rows]
    drawn = draw(weights, torch.tensor(uniforms, dtype=torch.float64).to(weights.device))
    proposed = [number for number, row in enumerate(rows) if row.proposal is not None]
    if proposed:
        index = torch.tensor(proposed).to(weights.device)
        proposals = [row.proposal for row in rows if row.proposal is not None]
        drawn[index] = keep_or_replace(weights[index], [rows[number] for number in proposed], proposals)
    return drawn
