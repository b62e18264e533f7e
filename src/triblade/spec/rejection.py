"""Rejection sampling: proposals drawn from q, kept or replaced so that the result is a draw from p, whatever q is.

p and q are integer weights over one vocabulary (`spec.distribution`), so q in the ratio is exactly what was drawn from. Source:
Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023, section 2.3, appendix A.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triblade.spec.distribution import WEIGHT_OF_BEST, draw
from triblade.spec.random_numbers import uniform
from triblade.spec.sampler_row import Proposal, SamplerRow

# Streams of random numbers beside the one of plain draws (0), so that a kept proposal tells nothing about its replacement.
ACCEPTANCE_STREAM, REPLACEMENT_STREAM, PROPOSAL_STREAM = 1, 2, 3


def keep_or_replace(target: Tensor, rows: Sequence[SamplerRow], proposals: Sequence[Proposal]) -> Tensor:
    """One token per row, int64 [R]: its proposal, or a draw from what p has more of than q.

    Args:
        target: integer weights [R, V] of p.
        rows: whose tokens they are.
        proposals: one for each.
    """
    tokens = torch.tensor([proposal.token_id for proposal in proposals], device=target.device)
    p = _normalised(target)
    q = _normalised(torch.stack([proposal.weights for proposal in proposals]).to(target.device))
    at = tokens.unsqueeze(-1)
    kept = _uniforms(rows, ACCEPTANCE_STREAM, target) * q.gather(-1, at)[:, 0] < p.gather(-1, at)[:, 0]
    residual = (p - q).clamp_(min=0)  # [R, V]
    largest = residual.amax(-1, keepdim=True)
    kept |= largest[:, 0] == 0  # p = q but for rounding
    weights = (residual / largest.where(largest > 0, 1.0)).mul_(WEIGHT_OF_BEST).float().trunc_()
    return tokens.where(kept, draw(weights, _uniforms(rows, REPLACEMENT_STREAM, target)))


def _normalised(weights: Tensor) -> Tensor:
    exact = weights.double()
    return exact / exact.sum(-1, keepdim=True)


def _uniforms(rows: Sequence[SamplerRow], stream: int, like: Tensor) -> Tensor:
    numbers = [uniform(row.seed, row.position, stream) for row in rows]
    return torch.tensor(numbers, dtype=torch.float64).to(like.device)
