"""A second decoder as drafter: its own weights, and its KV in extra layers of the same blocks as the target's.

Knows no target and no scheduler, only what computes its own steps. It computes what its frontier says is missing (see
`draft_blocks`), all requests in one forward, and then one token at a time for those that want more proposals. Whoever misses more
than one forward takes is caught up over several calls and goes on plain until then; so does whoever passes the draft's context.

Proposals are the draft's best tokens; with a draft temperature, requests that sample get draws from the draft's own distribution
instead, smoothed by that factor. Invariant: a proposal's `weights` are exactly what it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from triblade.sampling_params import SamplingParams
from triblade.spec.distribution import draw, filtered_weights
from triblade.spec.draft_blocks import DraftBlocks
from triblade.spec.drafter import Draft, DraftItem, DraftState, ReceivedRows
from triblade.spec.random_numbers import uniform
from triblade.spec.rejection import PROPOSAL_STREAM

MAX_TEMPERATURE = 100.0  # as in SamplingParams
# After so many steps in a row in which nobody who decodes wanted a draft, prompts are not computed either until somebody does.
IDLE_STEPS = 16


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Tokens of one request that the draft computes, from position `start` on."""

    request: DraftState
    start: int
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


class DraftScores(Protocol):
    """What the draft's head says about R rows."""

    @property
    def best(self) -> list[int]:
        """The token with the largest logit; -1 for a row that is not finite."""
        ...

    @property
    def logits(self) -> Tensor | None:
        """[R, V] float32, columns of the target's vocabulary, valid until the next call; None unless asked for."""
        ...


class DraftExecutor(Protocol):
    """Computes the draft's steps; the engine's executors are such."""

    def forward(self, items: Sequence[DraftTokens]) -> None:
        """Compute the items' tokens; items of equal length stand together."""
        ...

    def score(self, rows: Sequence[int], *, with_logits: bool) -> DraftScores:
        """Apply the head to rows of the last `forward`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """What a draft can do.

    Attributes:
        context_length: positions that the draft model takes.
        max_tokens: most tokens in one forward.
        temperature: factor on the temperature of requests that sample; 0 proposes the best tokens to them as well.
    """

    context_length: int
    max_tokens: int
    temperature: float = 0.0


@dataclass
class _Proposal:
    """A draft as it grows."""

    item: DraftItem
    length: int  # most tokens
    smoothing: float
    token_ids: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # [V] each; only of draws

    @property
    def is_drawn(self) -> bool:
        return self.smoothing > 0 and not self.item.request.params.is_greedy

    @cached_property
    def params(self) -> SamplingParams:
        """The request's, smoothed."""
        params = self.item.request.params
        return replace(params, temperature=min(params.temperature * self.smoothing, MAX_TEMPERATURE))

    def draft(self) -> Draft:
        """As it is now."""
        return Draft(self.token_ids, torch.stack(self.weights) if self.weights else None)


class ModelDrafter:
    """Implements `Drafter` with a decoder.

    Args:
        executor: computes the draft; its cache has the block ids of the target's.
        block_size: tokens per block.
        limits: see there.
    """

    def __init__(self, executor: DraftExecutor, block_size: int, limits: DraftLimits) -> None:
        self._executor = executor
        self._limits = limits
        self._blocks = DraftBlocks(block_size)
        self._idle_steps = 0  # in a row

    @property
    def num_requests(self) -> int:
        """Requests that are remembered."""
        return self._blocks.num_requests

    @property
    def num_claims(self) -> int:
        """Blocks whose draft KV is known, those of ended requests included."""
        return self._blocks.num_claims

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """See `Drafter`."""
        proposals = [_Proposal(item, self._length(item), self._limits.temperature) for item in items]
        self._count_idle(proposals)
        rows, growing = self._catch_up(proposals)
        while growing:
            growing = self._extend(growing, rows)
            if growing:
                self._compute([_newest(proposal) for proposal in growing])
            rows = list(range(len(growing)))
        for proposal in proposals:
            if proposal.token_ids:  # the last one was proposed, not computed
                self._blocks.drafted(proposal.item.request, proposal.token_ids[:-1])
        return [proposal.draft() for proposal in proposals]

    def forget(self, request: DraftState) -> None:
        """See `Drafter`."""
        self._blocks.forget(request)

    def num_filled(self, request: DraftState) -> int:
        """See `FillsRows`."""
        return self._blocks.filled(request)

    def received(self, request: DraftState, rows: ReceivedRows) -> None:
        """See `FillsRows`."""
        self._blocks.received(request, rows)

    def _count_idle(self, proposals: list[_Proposal]) -> None:
        if any(proposal.length > 0 for proposal in proposals):
            self._idle_steps = 0
        elif not all(proposal.item.is_chunk for proposal in proposals):
            self._idle_steps += 1

    def _length(self, item: DraftItem) -> int:
        """Tokens to propose: the j-th one is read off position stop + j - 1, which must exist for the draft."""
        return max(0, min(item.length, self._last(item) - item.stop))

    def _last(self, item: DraftItem) -> int:
        """End of the positions that the draft can compute for a request."""
        return min(self._limits.context_length, len(item.request.block_table) * self._blocks.block_size)

    def _catch_up(self, proposals: list[_Proposal]) -> tuple[list[int], list[_Proposal]]:
        """Compute missing tokens, the shortest runs first; who has its newest token now and wants a draft, and their rows."""
        wanted = sorted(self._missing(proposals), key=lambda pair: pair[1].num_tokens)
        budget = self._limits.max_tokens
        runs: list[tuple[_Proposal, DraftTokens]] = []
        for proposal, run in wanted:
            if budget > 0:
                runs.append((proposal, replace(run, token_ids=run.token_ids[:budget])))
                budget -= runs[-1][1].num_tokens
        runs.sort(key=lambda pair: pair[1].num_tokens)  # the one that was cut
        if not runs:
            return [], []
        self._compute([run for _, run in runs])
        rows, ready, row = list[int](), list[_Proposal](), -1
        for proposal, run in runs:
            row += run.num_tokens
            self._blocks.computed(run.request, run.stop)
            if proposal.length > 0 and run.stop > proposal.item.stop:
                rows.append(row)
                ready.append(proposal)
        return rows, ready

    def _missing(self, proposals: list[_Proposal]) -> list[tuple[_Proposal, DraftTokens]]:
        """Committed tokens to compute."""
        runs = []
        for proposal in proposals:
            request = proposal.item.request
            start = self._blocks.advance(request, proposal.item.stop)
            stop = self._goal(proposal)
            if start < stop:
                runs.append((proposal, DraftTokens(request, start, request.token_ids[start:stop])))
        return runs

    def _goal(self, proposal: _Proposal) -> int:
        """Where a request's frontier should be after this call: past its newest token if a draft is wanted.

        Chunks of a prompt are computed as they come while drafts are in use. Who decodes without wanting a draft is left behind:
        should drafts be wanted again, one forward over all that is missing costs much less than a forward each step.
        """
        item = proposal.item
        if proposal.length > 0:
            return item.stop + 1
        return min(item.stop, self._last(item)) if item.is_chunk and self._idle_steps < IDLE_STEPS else 0

    def _compute(self, runs: list[DraftTokens]) -> None:
        for run in runs:
            self._blocks.will_write(run.request, run.start, run.stop)
        self._executor.forward(runs)

    def _extend(self, growing: list[_Proposal], rows: Sequence[int]) -> list[_Proposal]:
        """Add a token to each; those that want another. A row that is not finite ends its proposal."""
        scores = self._executor.score(rows, with_logits=any(proposal.is_drawn for proposal in growing))
        going_on = [number for number, token in enumerate(scores.best) if token >= 0]
        for number in going_on:
            growing[number].token_ids.append(scores.best[number])
        drawn = [number for number in going_on if growing[number].is_drawn]
        if drawn:
            assert scores.logits is not None
            _draw([growing[number] for number in drawn], scores.logits[drawn])
        return [growing[number] for number in going_on if len(growing[number].token_ids) < growing[number].length]


def _newest(proposal: _Proposal) -> DraftTokens:
    """The last proposed token, to compute."""
    item = proposal.item
    return DraftTokens(item.request, item.stop + len(proposal.token_ids), proposal.token_ids[-1:])


def _draw(proposals: list[_Proposal], logits: Tensor) -> None:
    """Replace the last token of each by a draw from its row of logits [R, V], and keep what it was drawn from."""
    weights = filtered_weights(logits, [proposal.params for proposal in proposals])  # [R, V]
    uniforms = []
    for proposal in proposals:
        request = proposal.item.request
        position = len(request.output_token_ids) + len(proposal.token_ids) - 1
        uniforms.append(uniform(request.seed, position, PROPOSAL_STREAM))
    tokens = draw(weights, torch.tensor(uniforms, dtype=torch.float64).to(weights.device))
    for proposal, token, row in zip(proposals, tokens.tolist(), weights, strict=True):
        proposal.token_ids[-1] = token
        proposal.weights.append(row)
