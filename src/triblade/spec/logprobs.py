"""Log-probabilities of chosen tokens and the best alternatives, from raw logits.

Knows no sampling option: what a client reads does not depend on temperature, filters or penalties. Every value is
finite, and equal logits are ordered by id, so that the greedy token is always the first alternative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from triblade.sampling_params import TokenLogprobs, check_token_ids
from triblade.spec.distribution import WEIGHT_OF_BEST, total_weight, weights_of

FLOOR = -9999.0  # stands for -inf, which JSON cannot say
LOG_WEIGHT_OF_BEST = math.log(WEIGHT_OF_BEST)
CELLS_AT_ONCE = 2**22  # logits looked at together; bounds the memory of long prompts with large vocabularies


def token_logprobs(logits: Tensor, token_ids: Sequence[int], numbers: Sequence[int]) -> list[TokenLogprobs]:
    """Score one token per row.

    Args:
        logits: float32 [R, V], raw.
        token_ids: the token of each row.
        numbers: how many alternatives each row wants.

    Raises:
        RequestError: an id is outside the vocabulary.
    """
    check_token_ids("token_ids", token_ids, logits.shape[-1])
    step = max(1, CELLS_AT_ONCE // logits.shape[-1])
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), step):
        part = slice(start, start + step)
        found += _score(logits[part], token_ids[part], numbers[part])
    return found


def _score(logits: Tensor, token_ids: Sequence[int], numbers: Sequence[int]) -> list[TokenLogprobs]:
    chosen = logits.gather(-1, torch.tensor(token_ids).to(logits.device).unsqueeze(-1))  # [R, 1]
    normaliser = _log_sum_exp(logits)
    values = (chosen - normaliser).squeeze(-1).tolist()
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    top_ids, top_values = _best(logits, normaliser, min(max(numbers), logits.shape[-1]))
    return [
        TokenLogprobs(token, _finite(value), rank, tuple(zip(ids[:n], map(_finite, best), strict=False)))
        for token, value, rank, ids, best, n in zip(token_ids, values, ranks, top_ids, top_values, numbers, strict=True)
    ]


def _log_sum_exp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))), float64 [R, 1], from exact integer sums."""
    return logits.amax(-1, keepdim=True) + total_weight(weights_of(logits)).double().log() - LOG_WEIGHT_OF_BEST


def _best(logits: Tensor, normaliser: Tensor, number: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and log-probabilities of the best tokens of each row, equal ones in the order of their ids."""
    if number == 0:
        empty: list[list[int]] = [[] for _ in range(len(logits))]
        return empty, [[] for _ in range(len(logits))]
    ids = _order_keys(logits).topk(number).indices  # [R, N]
    return ids.tolist(), (logits.gather(-1, ids) - normaliser).tolist()


def _order_keys(logits: Tensor) -> Tensor:
    """Distinct int64 [R, V] that grow with the logit and, among equal ones, with the smaller id.

    The bits of a float32 order like an integer once those of a negative number are flipped; adding zero makes -0.0
    to 0.0.
    """
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(logits.shape[-1], device=logits.device)


def _finite(value: float) -> float:
    return value if value > FLOOR else FLOOR
