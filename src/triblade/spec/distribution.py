"""From logits to a distribution and a draw, so that a row's result is the same bits whatever stands beside it.

Every token gets an integer weight, floor(2^44 exp((logit - max) / temperature)), held exactly in float32; sums of
weights are taken in int64. Integer addition has no rounding, so no order of summation, batch size, thread count or
device changes a threshold or a draw. A token less likely than the best one by a factor of 2^44 has weight zero.

Filters act in vLLM's order: temperature, min_p, top_k, top_p (over what the first two leave). Each is a threshold
on the weight, so tokens of equal weight stay or go together and the order of equal logits never matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.sampling_params import SamplingParams

WEIGHT_OF_BEST = 2.0**44  # 2^19 tokens of this weight still add up within 63 bits
SMALLEST_EXPONENT = -64.0  # exp of less is far below one unit; results that are not normal numbers are slow to compute
BLOCK = 256  # tokens summed together on the way to a draw
NUM_CANDIDATES = (256, 4096)  # best tokens looked at first; all of them only for rows where these do not suffice


def weights_of(logits: Tensor, temperatures: Tensor | float = 1.0) -> Tensor:
    """Integer weights in float32 [R, V], 2^44 for the best token, of float32 logits [R, V] at temperatures [R, 1]."""
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
        _keep_top(part, top_k[chosen].long(), top_p[chosen] if any(p.top_p < 1 for p in params) else None)
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
    # Find the block first, then the token inside: sums of blocks are much cheaper than a running sum over everything.
    padded = F.pad(weights, (0, -weights.shape[-1] % BLOCK))
    blocks = padded.view(len(weights), padded.shape[-1] // BLOCK, BLOCK).long()  # [R, N, BLOCK]
    ends = blocks.sum(-1).cumsum(-1)  # [R, N]
    total = ends[:, -1:]
    target = (uniforms.unsqueeze(-1) * total).long().minimum(total - 1)
    block = _first_above(ends, target)  # [R, 1]
    inside = blocks.take_along_dim(block.unsqueeze(-1), 1).squeeze(1)  # [R, BLOCK]
    start = ends.gather(-1, block) - inside.sum(-1, keepdim=True)
    token = block * BLOCK + _first_above(inside.cumsum(-1), target - start)
    return token.squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _first_above(ascending: Tensor, target: Tensor) -> Tensor:
    """Index [R, 1] of the first element of each row [R, N] above its target; inside the row even if that holds NaN."""
    return torch.searchsorted(ascending, target, right=True).clamp_(max=ascending.shape[-1] - 1)


def _drop_below(weights: Tensor, threshold: Tensor) -> None:
    weights.masked_fill_(weights < threshold, 0.0)


def _keep_top(weights: Tensor, top_k: Tensor, top_p: Tensor | None) -> None:
    """Apply top_k, then top_p, in place.

    Args:
        weights: [R, V].
        top_k: int64 [R, 1]; 0 or less keeps all.
        top_p: float64 [R, 1]; 1 keeps all. None: no row has it.
    """
    vocab_size = weights.shape[-1]
    left = torch.arange(len(weights), device=weights.device)  # rows whose threshold is not among the candidates so far
    for size in (*(n for n in NUM_CANDIDATES if n < vocab_size), vocab_size):
        part = weights[left]
        best = part.topk(size).values  # [R, N], descending
        threshold, found = _rank_threshold(best, top_k[left], vocab_size)
        if top_p is not None:
            total = total_weight(part.masked_fill(part < threshold, 0.0))
            threshold, found = _mass_threshold(best, total, top_p[left], (threshold, found))
        _drop_below(part, threshold)
        weights[left] = part
        left = left[~found.squeeze(-1)]
        if len(left) == 0:
            return


def _rank_threshold(best: Tensor, top_k: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The top_k-th weight [R, 1], or zero where none is dropped or `best` [R, N] ends before; whether it is final."""
    size = best.shape[-1]
    is_among = (top_k > 0) & (top_k <= size)
    ranked = best.gather(-1, (top_k - 1).clamp(0, size - 1))
    return ranked.where(is_among, 0.0), is_among | (top_k <= 0) | (top_k >= vocab_size)


def _mass_threshold(
    best: Tensor, total: Tensor, top_p: Tensor, by_rank: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Raise the threshold to that of the fewest tokens, best first, whose weights reach top_p x total."""
    threshold, found = by_rank
    reached = best.long().cumsum(-1) >= top_p * total  # [R, N]
    last = best.gather(-1, reached.long().argmax(-1, keepdim=True))  # of the tokens kept
    is_off, is_among = top_p >= 1, reached[:, -1:]
    raised = torch.maximum(threshold, last).where(found & is_among & ~is_off, threshold)
    return raised, found & (is_among | is_off)
