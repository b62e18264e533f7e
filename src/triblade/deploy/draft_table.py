"""Draft lengths by batch size from the planner's cost model: the fixed stand-in for a policy that adapts while it serves.

For each batch size the length with the most tokens per second of a step, with the acceptance of the planner's tables. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from triblade.config import Plan
from triblade.deploy.speculative import DraftTable
from triblade.tune.candidates import weights
from triblade.tune.cost import StepCost
from triblade.tune.hardware import Hardware, kernels_of
from triblade.tune.rules import acceptance
from triblade.tune.serving import Candidate, expected_tokens
from triblade.tune.shape import ModelShape

STEPS = 2  # batch sizes looked at: 1, 2, 4, ...


def draft_table(plan: Plan, shape: ModelShape, hardware: Hardware) -> DraftTable:
    """Rows of first batch size, last batch size, draft length; neighbours with the same length are one row.

    Args:
        plan: with a drafter.
        shape: of its model.
        hardware: what it runs on.
    """
    table: list[tuple[int, int, int]] = []
    for first, last in _ranges(plan.decode.max_num_seqs):
        length = _best_length(plan, _cost(plan, shape, hardware), first)
        if table and table[-1][2] == length:
            first = table.pop()[0]
        table.append((first, last, length))
    return tuple(table)


def _ranges(most: int) -> Iterator[tuple[int, int]]:
    first = 1
    while first <= most:
        yield first, min(first * STEPS - 1, most)
        first *= STEPS


def _cost(plan: Plan, shape: ModelShape, hardware: Hardware) -> StepCost:
    stored = {each.scheme: each for each in weights(shape, hardware)}
    scheme = stored.get(plan.weights.scheme, next(iter(stored.values())))
    kv_dtype = "int8" if plan.decode.kv_cache_dtype == "int8" else "bfloat16"
    return StepCost(shape.config, hardware, kernels_of(hardware), scheme, kv_dtype)


def _best_length(plan: Plan, cost: StepCost, sequences: int) -> int:
    """0 where plain steps are fastest."""
    longest = min(plan.decode.num_speculative_tokens, acceptance(str(plan.decode.drafter)).longest)
    return max(range(longest + 1), key=lambda length: _tokens_per_s(plan, cost, sequences, length))


def _tokens_per_s(plan: Plan, cost: StepCost, sequences: int, length: int) -> float:
    """Of one sequence."""
    context = plan.workload.prompt_tokens + plan.workload.output_tokens / 2
    drafter = plan.decode.drafter if length else None
    candidate = Candidate(weights=cost.weights, drafter=drafter, draft_length=length)
    tokens, rows, drafting = expected_tokens(candidate, plan.workload)
    plain_s = cost.decode_s(sequences, context)
    return tokens / (cost.decode_s(sequences, context, rows) + drafting * plain_s)
