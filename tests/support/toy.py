"""A vocabulary of eight tokens: logits, combinations of options, and the distribution by the plainest way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from triblade.sampling_params import SamplingParams

TOY = [2.0, 0.5, -1.0, 1.2, 3.1, -0.4, 0.9, -3.0]
COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 50},
    {"top_k": -1, "top_p": 0.6},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.05, "top_p": 0.9},
    {"temperature": 2.5, "min_p": 0.1, "top_k": 6, "top_p": 0.85},
]


def reference_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min_p, top_k, top_p, one after the other, over a sorted list."""
    weights = {token: math.exp(x / params.temperature) for token, x in enumerate(logits)}
    best = max(weights.values())
    order = sorted((t for t, w in weights.items() if w >= params.min_p * best), key=lambda t: -weights[t])
    order = order[: params.top_k] if params.top_k > 0 else order
    mass = sum(weights[t] for t in order)
    kept: list[int] = []
    for token in order:
        if sum(weights[t] for t in kept) >= params.top_p * mass:
            break
        kept.append(token)
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(logits))]


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """Probability of counts as far as these, or farther, from what is expected (none of it zero)."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))
