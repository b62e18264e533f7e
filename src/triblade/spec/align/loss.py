"""The loss of a guess: cross entropy with a whole distribution, its gradient made in the same pass over the logits.

Logits are the largest tensors of a training by far, and the gradient, softmax(logits) - wanted, needs what the loss has just
computed: so it is made at once and kept in the logits' own type. Knows no head and no target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        """Sum over all rows; the parts of `wanted` [R, N] sum to 1 in each row."""
        shares = logits.float().log_softmax(-1)
        loss = -(shares * wanted).sum()
        ctx.save_for_backward(shares.exp_().sub_(wanted).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """The sum over R rows of the cross entropy of softmax(logits) with `wanted`, in nats.

    Args:
        logits: [R, N].
        wanted: [R, N], distributions; no gradient flows there.
    """
    loss: Tensor = _CrossEntropy.apply(logits, wanted)  # type: ignore[no-untyped-call]
    return loss
