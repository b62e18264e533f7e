"""Greedy answers of executors on a GPU, from which a request leaves now and then, and how near a tie two of them part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from native_models import all_logits, sequence
from tiny import prompt

from triblade.engine.executor import StepExecutor
from triblade.engine.request import Request
from triblade.engine.scheduler import ScheduledRequest

NEAR_TIE = 0.15  # deviations of a row's logits: three of what bfloat16 makes of the difference of two of a random model
LENGTHS = (3, 17, 40, 9, 64, 30, 12, 5, 22, 41, 8, 19, 33, 27, 6, 11, 13, 50, 21, 4)


def begun(executor: StepExecutor, count: int) -> list[Request]:
    """Requests of which everything but the last token is computed."""
    requests = [sequence(n, prompt(length, seed=n)) for n, length in enumerate(LENGTHS[:count])]
    for number, request in enumerate(requests):
        request.block_table = type(request.block_table)("i", range(number * 20, (number + 1) * 20))
        executor.forward([ScheduledRequest.next(request, request.num_tokens - 1)])
        request.num_computed_tokens = request.num_tokens - 1
    return requests


def greedy(executor: StepExecutor, requests: Sequence[Request], steps: int) -> None:
    for _ in range(steps):
        executor.forward([ScheduledRequest.next(r, 1) for r in requests])
        best = executor.score(range(len(requests)), with_logits=False).best
        for request, token in zip(requests, best, strict=True):
            request.num_computed_tokens += 1
            request.append(token)


def outputs(executor: Any, count: int) -> list[list[int]]:
    """40 tokens of each; every fifth step one request leaves."""
    requests = begun(executor, count)
    left = list(requests)
    for _ in range(8):
        greedy(executor, left, 5)
        left = left[1:] if len(left) > 1 else left
    return [request.output_token_ids for request in requests]


def preference(judge: StepExecutor, ours: list[int], theirs: list[int], ids: list[int]) -> float:
    """How much `judge` prefers one token to the other where two answers part, in deviations of its logits; 0 for equal ones."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            logits = all_logits(judge, [*ids, *ours[:position]])[-1]
            return abs(float(logits[a] - logits[b])) / float(logits.std())
    return 0.0
