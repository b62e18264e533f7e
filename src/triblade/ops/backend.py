"""The numeric kernels a decoder is written against: one class, about ten methods, no state but its options.

A faster backend overrides what it has kernels for and inherits the rest from the reference. Rows (tokens) are independent in
every op but attention. Knows no model family, no scheduler, no paging: attention takes keys and values already gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A dense matrix as it is multiplied: y = x W^T + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Who sees whom, for S sequences with Q queries each over L keys."""

    allowed: (
        Tensor | None
    )  # [S, Q, L] bool; None: every query sees all keys up to its own, and L - Q keys precede the first

    def explicit(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The mask spelled out, [S or 1, Q, L] bool."""
        if self.allowed is not None:
            return self.allowed
        return torch.ones(1, queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class Backend(Protocol):
    """What `models.decoder` calls. H query heads, G key-value heads, D head size, T tokens of any number of sequences."""

    name: str

    def embed(self, weight: Tensor, ids: Tensor, scale: float) -> Tensor:
        """Rows `ids` [T] of `weight` [V, C], times `scale`: [T, C]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight of x [..., N] and float32 weight [N], computed in float32; the result is like `x`."""
        ...

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """[T, in] -> [T, out]."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first 2 * R of the D dimensions of x [T, N, D] by cos, sin [T, R]; dimension i pairs with i + R."""
        ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float | None
    ) -> Tensor:
        """Softmax attention with grouped heads: q [S, Q, H, D], k and v [S, L, G, D] -> [S, Q, H, D]."""
        ...

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """act(gate) * up of the halves of [T, 2 * I]: [T, I]."""
        ...

    def logits(self, hidden: Tensor, head: Linear, softcap: float | None) -> Tensor:
        """[R, C] -> [R, V] float32, with softcap * tanh(x / softcap) if given."""
        ...
