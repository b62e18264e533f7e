"""Drafters that need no model, which know the answer and are wrong as often as told, and one around a tiny decoder."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from triblade.engine.executor import TorchExecutor
from triblade.engine.speculation import Speculator
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.llm import LLM
from triblade.models.loader import OpenModel
from triblade.ops.deterministic import DeterministicBackend
from triblade.spec.distribution import draw, weights_of
from triblade.spec.draft_model import DraftLimits, ModelDrafter
from triblade.spec.drafter import Draft, Drafter, DraftItem, DraftState
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


def model_drafter(llm: LLM, draft: OpenModel, temperature: float = 0.0) -> ModelDrafter:
    """A deterministic draft model beside an engine, in a pool of as many blocks."""
    config, scheduler = draft.config, llm.engine.scheduler
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=scheduler.block_size,
        codec="float32",
    )
    cache = KVCache(layout, llm.engine.pool.num_blocks, torch.float32)
    decoder = draft.load(config.context_length, DeterministicBackend(), torch.device("cpu"))
    executor = TorchExecutor(decoder, cache, llm.engine.model.vocab_size)
    limits = DraftLimits(
        context_length=config.context_length, max_tokens=scheduler.max_num_batched_tokens, temperature=temperature
    )
    return ModelDrafter(executor, scheduler.block_size, limits)


def speculate(llm: LLM, drafter: Drafter, length: int, policy: DraftPolicy | None = None) -> LLM:
    """The engine with a drafter, asked for `length` tokens every time, or for what a policy says."""
    llm.engine.speculator = Speculator(drafter, llm.engine.scheduler, policy or FixedPolicy(length))
    return llm
