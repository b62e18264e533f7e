"""Executes one step: tokens -> executor -> logits of the rows that need them -> sampled tokens and log-probabilities.

Owns no request state: what it returns is aligned with what was scheduled. Rows whose logits
are not finite get no token, so that one bad request never poisons another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from triblade.engine.executor import StepExecutor
from triblade.engine.request import Request
from triblade.engine.scheduler import ScheduledRequest
from triblade.sampling_params import TokenLogprobs
from triblade.spec.sampler import Sampler, SamplerRow

# Rows of prompt logits made at a time: bounds the memory of prompt log-probabilities to this many vocabularies.
PROMPT_LOGITS_ROWS = 32


@dataclass(slots=True)
class StepResult:
    """What one step found out about one scheduled request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)  # new tokens; none while the prompt is incomplete
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one per token
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in the prompt
    prompt_done: bool = False
    is_finite: bool = True


class ModelRunner:
    """An executor with its sampler."""

    def __init__(self, executor: StepExecutor, sampler: Sampler) -> None:
        self.executor = executor
        self.sampler = sampler

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> list[StepResult]:
        """Compute one step; one result per scheduled request, those with fewest tokens first."""
        items = sorted(scheduled, key=lambda item: item.num_tokens)  # equal lengths stand together
        first_rows = [0, *accumulate(item.num_tokens for item in items)]
        self.executor.forward(items)
        results = [StepResult(item.request, prompt_done=item.samples) for item in items]
        self._score_prompts(items, first_rows, results)
        self._sample(items, first_rows, results)
        return results

    def _sample(self, items: list[ScheduledRequest], first_rows: list[int], results: list[StepResult]) -> None:
        """Sample for every item that reached the end of its known tokens, unless it wants no token."""
        chosen = [i for i, item in enumerate(items) if item.samples and item.request.max_tokens > 0]
        if not chosen:
            return
        logits = self.executor.logits([first_rows[i + 1] - 1 for i in chosen])
        best = self.executor.best()
        if min(best) < 0:
            for i, token in zip(chosen, best, strict=True):
                results[i].is_finite = token >= 0
            kept = [n for n, token in enumerate(best) if token >= 0]
            chosen, best, logits = [chosen[n] for n in kept], [best[n] for n in kept], logits[kept]
        if not chosen:
            return
        sampled = self.sampler.sample(logits, [sampler_row(items[i].request) for i in chosen], best)
        for i, token, logprobs in zip(chosen, sampled.token_ids, sampled.logprobs, strict=True):
            results[i].token_ids, results[i].logprobs = [token], [logprobs]

    def _score_prompts(self, items: list[ScheduledRequest], first_rows: list[int], results: list[StepResult]) -> None:
        """Log-probabilities of the prompt tokens that follow this chunk's tokens, where asked for."""
        for item, first_row, result in zip(items, first_rows, results, strict=False):
            request = item.request
            if request.params.prompt_logprobs is None:
                continue
            # The token at position p predicts the one at p + 1.
            stop = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
            for start in range(item.start, stop, PROMPT_LOGITS_ROWS):
                targets = request.prompt_token_ids[start + 1 : min(start + PROMPT_LOGITS_ROWS, stop) + 1]
                row = first_row + start - item.start
                logits = self.executor.logits(range(row, row + len(targets)))
                scored = self.sampler.logprobs(logits, targets, [request.params.prompt_logprobs] * len(targets))
                result.prompt_logprobs.update(enumerate(scored, start + 1))


def sampler_row(request: Request) -> SamplerRow:
    """What the sampler must know of a request."""
    return SamplerRow(
        params=request.params,
        seed=request.seed,
        position=len(request.output_token_ids),
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        stop_token_ids=request.stop_token_ids,
        bad_words=request.bad_words_ids,
    )
