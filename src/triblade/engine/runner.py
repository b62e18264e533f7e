"""Executes one step: tokens -> executor -> scores of the rows that need them -> verified drafts, new tokens, log-probabilities.

Plain decoding is a draft of length zero. A request with k drafts has k + 1 rows: row j is sampled as if the first j drafts were
committed; the tokens count up to and including the first that differs from its draft.

    tokens   ... 41 42 | d0 d1 d2        computed in this step: 42 d0 d1 d2
    rows               |  0  1  2  3     sampled:               d0 d1 x  -     -> new tokens d0 d1 x, two drafts accepted

Owns no request state: what it returns is aligned with what was scheduled. Rows whose logits are not finite get no token, so that
one bad request never poisons another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor

from triblade.engine.executor import GREEDY, Choice, ChoosesTokens, Draw, DrawsTokens, Scores, StepExecutor
from triblade.engine.pooling import pooled_rows
from triblade.engine.request import Request
from triblade.engine.scheduler import ScheduledRequest
from triblade.sampling_params import TokenLogprobs
from triblade.spec.constraint import TokenConstraint, allowed_behind
from triblade.spec.sampler import Proposal, Sampled, Sampler, SamplerRow, uniform

# Rows of prompt logits made at a time: bounds the memory of prompt log-probabilities to this many vocabularies.
PROMPT_LOGITS_ROWS = 32


@dataclass(slots=True)
class StepResult:
    """What one step found out about one scheduled request."""

    item: ScheduledRequest
    first_row: int  # of the item among the executor's hidden states
    token_ids: list[int] = field(
        default_factory=list
    )  # new tokens, accepted drafts first; none while the prompt is incomplete
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # one per token
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position in the prompt
    pooled: Tensor | None = None  # float64 [C]: states of the chunk that belong to the prompt's vector, together
    is_finite: bool = True

    @property
    def request(self) -> Request:
        return self.item.request

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts among the new tokens."""
        return max(0, len(self.token_ids) - 1)


class ModelRunner:
    """An executor with its sampler."""

    def __init__(self, executor: StepExecutor, sampler: Sampler) -> None:
        self.executor = executor
        self.sampler = sampler
        # Asked once: comparing with a protocol takes longer than a step may.
        self._drawer = executor if isinstance(executor, DrawsTokens) else None
        self._chooser = executor if isinstance(executor, ChoosesTokens) else None
        self._ahead: ThreadPoolExecutor | None = None

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> list[StepResult]:
        """Compute one step; one result per scheduled request, those with fewest tokens first."""
        items = sorted(scheduled, key=lambda item: item.num_tokens)  # equal lengths stand together
        first_rows = [0, *accumulate(item.num_tokens for item in items)]
        results = [StepResult(item, row) for item, row in zip(items, first_rows, strict=False)]
        sampling = [r for r in results if r.item.samples and r.request.max_tokens > 0]
        is_chosen = self._leave_choice(results, sampling)
        pooling = [result for result in results if result.request.params.pooling is not None]
        looking = self._look_ahead(sampling)
        self.executor.forward(items, with_states=bool(pooling))
        if looking is not None:
            looking.result()
        self._score_prompts(results)
        self._pool(pooling)
        if sampling:
            self._sample(sampling, is_chosen)
        return results

    def _look_ahead(self, sampling: list[StepResult]) -> Future[None] | None:
        """Have constraints find out what may come next while the step computes; nobody else touches them meanwhile."""
        constraints = [r.request.constraint for r in sampling if r.request.constraint is not None]
        if not constraints:
            return None
        self._ahead = self._ahead or ThreadPoolExecutor(1, "triblade-masks")
        return self._ahead.submit(_look, constraints)

    def _leave_choice(self, results: list[StepResult], sampling: list[StepResult]) -> bool:
        """Whether the executor chooses all tokens itself: greedy ones, and drawn ones where it can."""
        # Whoever's first row is plain and greedy has only such rows: no later one has more to bar.
        firsts = [next(sampler_rows(result.request, 0)) for result in sampling]
        is_free = all(result.request.constraint is None for result in sampling)
        is_greedy = is_free and all(row.is_plain_greedy for row in firsts)
        if self._drawer is None:
            return is_greedy
        is_drawn = is_free and not is_greedy and all(row.is_plain_greedy or row.is_plain_draw for row in firsts)
        self._drawer.expect_draws(_draws(results, sampling, firsts) if is_drawn else None)
        return is_greedy or is_drawn

    def _sample(self, results: list[StepResult], is_chosen: bool) -> None:
        """Sample and verify for every item that reached the end of its known tokens."""
        rows = list[int]()
        for result in results:
            end = result.first_row + result.item.num_tokens
            rows += range(end - result.item.num_draft_tokens - 1, end)
        if is_chosen:
            sampled = Sampled(self.executor.score(rows, with_logits=False).best, [None] * len(rows))
        else:
            sampled = self._sample_rows(rows, results)
        at = 0
        for result in results:
            stop = at + result.item.num_draft_tokens + 1
            _verify(result, sampled.token_ids[at:stop], sampled.logprobs[at:stop])
            at = stop

    def _sample_rows(self, rows: list[int], results: list[StepResult]) -> Sampled:
        """A token for every row, -1 for those that are not finite."""
        wanted = [row for r in results for row in _constrained(r.request, r.item.num_draft_tokens)]
        whole = Sampled([], [])
        size = self.executor.max_rows or len(rows)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            sampled = self._choose_some(rows[part], wanted[part])
            whole.token_ids.extend(sampled.token_ids)
            whole.logprobs.extend(sampled.logprobs)
        return whole

    def _choose_some(self, rows: list[int], wanted: list[SamplerRow]) -> Sampled:
        """The same for rows whose logits can be held together; the executor chooses where it can, whoever stands beside it."""
        if self._chooser is None:
            scores, others = self.executor.score(rows, with_logits=True), list(range(len(rows)))
        else:
            choices = [_choice(row) for row in wanted]
            scores = self._chooser.choose(rows, choices)
            others = [number for number, choice in enumerate(choices) if choice is None]
        chosen = Sampled(list(scores.best), [None] * len(rows))
        if others:
            sampled = self._sample_others(scores, others, [wanted[number] for number in others])
            for number, token, logprobs in zip(others, sampled.token_ids, sampled.logprobs, strict=True):
                chosen.token_ids[number] = token if scores.best[number] >= 0 else -1
                chosen.logprobs[number] = logprobs
        return chosen

    def _sample_others(self, scores: Scores, numbers: list[int], wanted: list[SamplerRow]) -> Sampled:
        """The rows of these numbers, by the sampler."""
        assert scores.logits is not None
        if len(numbers) == len(scores.best):
            return self.sampler.sample(scores.logits, wanted, scores.best)
        return self.sampler.sample(scores.logits[numbers], wanted, [scores.best[number] for number in numbers])

    def _score_prompts(self, results: list[StepResult]) -> None:
        """Log-probabilities of the prompt tokens that follow this chunk's tokens, where asked for."""
        for result in results:
            item, request = result.item, result.request
            number = request.params.prompt_logprobs
            if number is None:
                continue
            # The token at position p predicts the one at p + 1.
            stop = min(item.start + item.num_tokens, request.num_prompt_tokens - 1)
            for start in range(item.start, stop, PROMPT_LOGITS_ROWS):
                targets = request.prompt_token_ids[start + 1 : min(start + PROMPT_LOGITS_ROWS, stop) + 1]
                row = result.first_row + start - item.start
                logits = self.executor.score(range(row, row + len(targets)), with_logits=True).logits
                assert logits is not None
                scored = self.sampler.logprobs(logits, targets, [number] * len(targets))
                result.prompt_logprobs.update(enumerate(scored, start + 1))

    def _pool(self, results: list[StepResult]) -> None:
        """Add up the hidden states that prompts are to be described by."""
        for result in results:
            rows = pooled_rows(result.item, result.first_row)
            if rows:
                result.pooled = self.executor.final_states(rows).double().sum(0).cpu()


def _look(constraints: list[TokenConstraint]) -> None:
    for constraint in constraints:
        constraint.allowed()


def _verify(result: StepResult, tokens: list[int], logprobs: list[TokenLogprobs | None]) -> None:
    """Take the sampled tokens up to and including the first that is not the draft's."""
    drafts, last = result.request.draft_token_ids, 0
    while last < result.item.num_draft_tokens and tokens[last] == drafts[last]:
        last += 1
    if tokens[last] < 0:
        # What was accepted before is sound; the request ends when it comes to this position again.
        result.is_finite = last > 0
        last -= 1
    result.token_ids, result.logprobs = tokens[: last + 1], logprobs[: last + 1]


def _choice(row: SamplerRow) -> Choice | None:
    """How an executor can choose this row's token; None if that takes more than it knows."""
    if not row.is_simple:
        return None
    params = row.params
    if params.is_greedy:
        return Choice(0.0, 0.0, 0.0, row.allowed)
    return Choice(uniform(row.seed, row.position), params.temperature, params.min_p, row.allowed)


def _draws(results: list[StepResult], sampling: list[StepResult], wanted: list[SamplerRow]) -> list[Draw]:
    """How each item goes on."""
    drawn = {
        result.first_row: Draw(
            row.seed, row.position, row.params.temperature, row.params.min_p, result.item.num_draft_tokens + 1
        )
        for result, row in zip(sampling, wanted, strict=True)
        if not row.params.is_greedy
    }
    return [drawn.get(result.first_row, GREEDY) for result in results]


def _constrained(request: Request, num_draft_tokens: int) -> list[SamplerRow]:
    """The rows of a request, each with what its constraint allows there."""
    rows = list(sampler_rows(request, num_draft_tokens))
    if request.constraint is not None:
        masks = allowed_behind(request.constraint, request.draft_token_ids[:num_draft_tokens])
        for row, mask in zip(rows, masks, strict=True):
            row.allowed = mask
    return rows


def sampler_rows(request: Request, num_draft_tokens: int) -> Iterator[SamplerRow]:
    """What the sampler must know of the rows of a request: row j follows its first j drafts."""
    drafts, weights = request.draft_token_ids, request.draft_weights
    before: Sequence[int] = request.output_token_ids
    for number in range(num_draft_tokens + 1):
        proposal = None
        if weights is not None and number < num_draft_tokens:
            proposal = Proposal(drafts[number], weights[number])
        row = SamplerRow(
            params=request.params,
            seed=request.seed,
            position=len(request.output_token_ids) + number,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=before,
            stop_token_ids=request.stop_token_ids,
            bad_words=request.bad_words_ids,
            proposal=proposal,
        )
        yield row
        if number < num_draft_tokens and not row.is_plain:  # a plain row does not look back
            before = [*before, drafts[number]]
