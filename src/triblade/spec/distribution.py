"""From logits to a distribution and a draw, so that a row's result is the same bits whatever stands beside it.

Every token gets an integer weight, floor(2^44 exp((logit - max) / temperature)), held exactly in float32; sums of weights are
taken in int64. Integer addition has no rounding, so no order of summation, batch size, thread count or device changes a
threshold or a draw. A token less likely than the best one by a factor of 2^44 has weight zero.

Filters act in vLLM's order: temperature, min_p, top_k, top_p (over what the first two leave). Each is a threshold on the
weight, so tokens of equal weight stay or go together and the order of equal logits never matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triblade.sampling_params import SamplingParams

WEIGHT_OF_BEST = 2.0**44  # 2^19 tokens of this weight still add up within 63 bits
SMALLEST_EXPONENT = -64.0  # exp of less is far below one unit; results that are not normal numbers are slow to compute
NUM_CANDIDATES = (256, 4096)  # best tokens looked at first; all of them only for rows where these do not suffice


def weights_of(logits: Tensor, temperatures: Tensor | float = 1.0) -> Tensor:
    """Integer weights, exact in float32 [R, V], of float32 logits [R, V] at temperatures [R, 1]; the best token has 2^44."""
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperatures)
    return scaled.clamp_(min=SMALLEST_EXPONENT).exp_().mul_(WEIGHT_OF_BEST).trunc_()


def total_weight(weights: Tensor) -> Tensor:
    """Exact sums over the vocabulary: [R, V] -> int64 [R, 1]."""
    return weights.long().sum(-1, keepdim=True)


def filtered_weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Weights [R, V] of the tokens that temperature, min_p, top_k and top_p leave, zero for the others.

    Args:
        logits: float32 [R, V], processed; -inf is never drawn.
        params: one per row, none of them greedy.
    """
    # The settings of all rows go to the device at once: [4, R, 1].
    settings = [[float(getattr(p, name)) for p in params] for name in ("temperature", "min_p", "top_p", "top_k")]
    temperature, min_p, top_p, top_k = torch.tensor(settings, dtype=torch.float64).to(logits.device).unsqueeze(-1)
    weights = weights_of(logits, temperature.float())
    if any(p.min_p > 0 for p in params):
        _drop_below(weights, (min_p * WEIGHT_OF_BEST).float())
    limited = [number for number, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if limited:
        chosen = torch.tensor(limited).to(logits.device)
        part = weights[chosen]
        _keep_top(part, top_k[chosen].long(), top_p[chosen])
        weights[chosen] = part
    return weights


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by inverting the cumulative distribution in the order of token ids.

    Args:
        weights: integers held in float32 [R, V], at least one above zero per row.
        uniforms: float64 [R], in [0, 1).

    Returns:
        Token ids int64 [R]; never one of weight zero.
    """
    cumulative = weights.long().cumsum(-1)  # [R, V]
    total = cumulative[:, -1:]
    target = (uniforms.unsqueeze(-1) * total).long().minimum(total - 1)
    # A row of NaN has no meaningful sums; the clamp keeps even its token inside the vocabulary.
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _drop_below(weights: Tensor, threshold: Tensor) -> None:
    weights.masked_fill_(weights < threshold, 0.0)


def _keep_top(weights: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Apply top_k, then top_p, in place: weights [R, V], int64 top_k [R, 1] (0 or less: off), float64 top_p [R, 1]."""
    vocab_size = weights.shape[-1]
    left = torch.arange(len(weights), device=weights.device)  # rows whose threshold is not among the candidates so far
    for size in (*(n for n in NUM_CANDIDATES if n < vocab_size), vocab_size):
        part = weights[left]
        threshold, found = _thresholds(part, part.topk(size).values, top_k[left], top_p[left])
        _drop_below(part, threshold)
        weights[left] = part
        left = left[~found.squeeze(-1)]
        if len(left) == 0:
            return


def _thresholds(weights: Tensor, ordered: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest weight that both filters keep [R, 1], and whether the sorted prefix `ordered` [R, N] sufficed to find it.

    Where it did not, the threshold is zero and keeps everything.
    """
    size = ordered.shape[-1]
    by_rank = (top_k > 0) & (top_k <= size)
    ranked = ordered.gather(-1, (top_k - 1).clamp(0, size - 1))
    threshold = torch.where(by_rank, ranked, torch.zeros_like(ranked))
    rank_found = by_rank | (top_k <= 0) | (top_k >= weights.shape[-1])

    # The least number of tokens, best first, that hold the share top_p of what is left.
    total = total_weight(weights.masked_fill(weights < threshold, 0.0))
    reached = ordered.long().cumsum(-1) >= top_p * total  # [R, N]
    mass_found = reached[:, -1:]
    nucleus = ordered.gather(-1, reached.long().argmax(-1, keepdim=True))
    limits_mass = (top_p < 1) & rank_found & mass_found
    threshold = torch.where(limits_mass, torch.maximum(threshold, nucleus), threshold)
    return threshold, rank_found & (mass_found | (top_p >= 1))
