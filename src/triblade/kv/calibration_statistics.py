"""What is gathered of keys and values for a table: moments of all tokens, how much the model minds errors, and a bounded sample.

    mean, covariance   of keys before the rotary embedding (behind the key norm, where there is one) and of values, by layer
    metric             E[g g'], g the gradient of the log-likelihood of a drawn continuation by the key or value of one token: by
                       second order, an error e of that token changes the model's predictions by KL = e' metric e / 2 nats in all
    sample             tokens, for distributions along single directions

Knows no model and no text. Memory depends on the sizes of the model and on `sample_tokens`, not on how many tokens are seen.
Shapes: L layers, 2 for keys and values, T tokens, C = key-value heads * head size: one joint space per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the tokens seen."""

    num_tokens: int
    mean: Tensor  # [L, 2, C] float64
    covariance: Tensor  # [L, 2, C, C] float64
    metric: Tensor | None  # [L, 2, C, C] float64; None: no gradients were given
    sample: Tensor  # [L, 2, S, C] bfloat16


class KVStatistics:
    """Gathers.

    Args:
        num_layers: L.
        width: C.
        sample_tokens: most tokens kept as they are.
        seed: of the choice which ones.
    """

    def __init__(self, num_layers: int, width: int, sample_tokens: int, seed: int = 0) -> None:
        self._sum = torch.zeros(num_layers, 2, width, dtype=torch.float64)
        self._outer = torch.zeros(num_layers, 2, width, width, dtype=torch.float64)
        self._metric = torch.zeros_like(self._outer)
        self._num_tokens = self._num_gradients = 0
        self._sample = Reservoir(num_layers, width, sample_tokens, seed)

    def add(self, x: Tensor) -> None:
        """Keys and values [L, 2, T, C] of some tokens."""
        self._sum += x.sum(2)
        self._outer += torch.matmul(x.transpose(2, 3), x)
        self._num_tokens += x.shape[2]
        self._sample.add(x)

    def add_gradients(self, gradients: Tensor) -> None:
        """Of the log-likelihood by keys and values, [L, 2, T, C]."""
        self._metric += torch.matmul(gradients.transpose(2, 3), gradients)
        self._num_gradients += gradients.shape[2]

    def moments(self) -> Moments:
        """What was gathered so far."""
        count = max(1, self._num_tokens)
        mean = self._sum / count
        covariance = self._outer / count - mean[..., None] * mean[..., None, :]
        metric = self._metric / self._num_gradients if self._num_gradients else None
        return Moments(self._num_tokens, mean, covariance, metric, self._sample.tokens())


class Reservoir:
    """A uniform sample of a stream of tokens of unknown length (Vitter 1985, algorithm R).

    Args:
        num_layers: L.
        width: C.
        capacity: most tokens kept.
        seed: of the choice.
    """

    def __init__(self, num_layers: int, width: int, capacity: int, seed: int = 0) -> None:
        self._kept = torch.empty(num_layers, 2, capacity, width, dtype=torch.bfloat16)
        self._capacity = capacity
        self._seen = 0
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return min(self._seen, self._capacity)

    def add(self, x: Tensor) -> None:
        """Tokens [L, 2, T, C]."""
        order = torch.arange(self._seen, self._seen + x.shape[2])
        drawn = (torch.rand(len(order), generator=self._generator) * (order + 1)).long()
        place = torch.where(order < self._capacity, order, drawn)  # a token is kept if its place is within the sample
        self._seen += len(order)
        last = dict(zip(place.tolist(), range(len(order)), strict=True))  # of several for one place the last stays
        taken = [(to, at) for to, at in last.items() if to < self._capacity]
        if taken:
            to, at = torch.tensor(taken).T
            self._kept[:, :, to] = x[:, :, at].to(torch.bfloat16)

    def tokens(self) -> Tensor:
        """[L, 2, S, C] bfloat16."""
        return self._kept[:, :, : len(self)]
