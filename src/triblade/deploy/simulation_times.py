"""What the steps of a replica take: four numbers that are measured, or taken from the cost model of a plan. Pure.

A step that gives `n` sequences a token, with `context` tokens in their caches together, and computes `c` prompt tokens, takes
`step + n x sequence + context x context token + c x prompt token`. Knows no queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from triblade.config import Workload
from triblade.tune.cost import StepCost
from triblade.tune.serving import Candidate, expected_tokens, link_bytes_per_s

FEW, MANY = 1, 32  # sequences between which a step's time is taken for a line
CHUNKS = 8  # of a prompt that the time of a prompt token is taken from


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds; everything else is proportional.

    Attributes:
        request_s: that a request takes on its way, to the replica and back.
        transfer_s: before KV arrives where it is decoded, and `transfer_token_s` for each of its tokens.
        tokens_per_step: that a sequence gets, on average (speculation).
    """

    step_s: float
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    prompt_token_s: float = 0.0
    request_s: float = 0.0
    transfer_s: float = 0.0
    transfer_token_s: float = 0.0
    tokens_per_step: float = 1.0

    def of(self, sequences: int, context: float, prompt_tokens: int) -> float:
        """Of one step."""
        growing = self.sequence_s * sequences + self.context_token_s * context
        return self.step_s + growing + self.prompt_token_s * prompt_tokens


def predicted_times(candidate: Candidate, cost: StepCost, workload: Workload, chunk: int) -> StepTimes:
    """By the cost model of plans, as a line through two batches and a long prompt."""
    context = workload.prompt_tokens + workload.output_tokens / 2
    tokens, rows, drafting = expected_tokens(candidate, workload)

    def step(sequences: int, length: float) -> float:
        plain = cost.decode_s(sequences, length) if drafting else 0.0
        return cost.decode_s(sequences, length, rows) + drafting * plain

    few, many, empty = step(FEW, context), step(MANY, context), step(MANY, 0.0)
    of_context = max(0.0, many - empty) / (MANY * context)
    each = max(0.0, (many - few) / (MANY - FEW) - of_context * context)
    base = max(0.0, few - each - of_context * context)
    prompt = max(0.0, cost.prefill_s(CHUNKS * chunk, 0, chunk) - CHUNKS * base) / (CHUNKS * chunk)
    return StepTimes(
        step_s=base,
        sequence_s=each,
        context_token_s=of_context,
        prompt_token_s=prompt,
        transfer_token_s=cost.kv_token_bytes / link_bytes_per_s(cost.hardware, candidate),
        tokens_per_step=tokens,
    )
