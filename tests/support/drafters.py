"""Drafters that need no model: they know the answer, and are wrong as often as told."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from triblade.engine.speculation import Speculator
from triblade.llm import LLM
from triblade.spec.distribution import draw, weights_of
from triblade.spec.drafter import Draft, DraftItem, DraftState
from triblade.spec.policy import DraftPolicy, FixedPolicy
from triblade.spec.random_numbers import uniform
from triblade.spec.rejection import PROPOSAL_STREAM


class ScriptedDrafter:
    """Proposes what follows in a known answer, each token changed with probability `wrong`.

    Args:
        answers: prompt -> output tokens.
        vocab_size: of the target.
        wrong: share of the tokens that are changed.
    """

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, wrong: float) -> None:
        self._answers, self._vocab_size, self._wrong = answers, vocab_size, wrong
        self._random = random.Random(5)
        self.forgotten: list[int] = []

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        return [Draft([self._maybe_wrong(t) for t in self._next(item)]) for item in items]

    def forget(self, request: DraftState) -> None:
        self.forgotten.append(request.number)

    def _next(self, item: DraftItem) -> Sequence[int]:
        start = len(item.request.output_token_ids)
        return self._answers[tuple(item.request.prompt_token_ids)][start : start + item.length]

    def _maybe_wrong(self, token: int) -> int:
        if self._random.random() >= self._wrong:
            return token
        return (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size


class RandomDrafter:
    """Draws its tokens from fixed random distributions, one per number of output tokens."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = weights_of(torch.randn(64, vocab_size, generator=self._generator))

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        return [self._draft(item) for item in items]

    def forget(self, request: DraftState) -> None:
        pass

    def _draft(self, item: DraftItem) -> Draft:
        position = len(item.request.output_token_ids)
        weights = self._weights[torch.arange(position, position + item.length) % 64]
        numbers = [uniform(item.request.seed, position + i, PROPOSAL_STREAM) for i in range(item.length)]
        tokens = draw(weights, torch.tensor(numbers, dtype=torch.float64)).tolist() if numbers else []
        return Draft(tokens, weights)


def speculate(
    llm: LLM, drafter: ScriptedDrafter | RandomDrafter, length: int, policy: DraftPolicy | None = None
) -> LLM:
    """The engine with a drafter, asked for `length` tokens every time, or for what a policy says."""
    llm.engine.speculator = Speculator(drafter, llm.engine.scheduler, policy or FixedPolicy(length))
    return llm
