"""Training as the head will be used: unrolled, each step fed with the hidden states of the step before (EAGLE-3, section 3.1).

Step j at position p stands for the (j + 1)-th guess of a chain that began behind token p - j. Its keys are what such a chain finds
in the cache: those made from the target's hidden states up to the chain's beginning, then one of every step so far.

    step 0 sees  K0: 0 .. p               step 2 sees  K0: 0 .. p-2,  K1: p-1,  K2: p

Knows batches of padded sequences, no text and no optimizer. A position never sees padding, which is on the right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.ops.attention import unplanned
from triblade.spec.eagle import EagleHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Padded sequences and what the target made of them."""

    ids: Tensor  # [B, L] int64
    hidden: Tensor  # [B, L, F * C], the target's; see `batches.target_hidden`
    first: Tensor  # [B] first token that counts
    lengths: Tensor  # [B] without padding

    def counted(self, step: int) -> Tensor:
        """[B, L] bool: where a chain that began in the counted text makes guess number `step`, and the next token is known."""
        position = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (position >= self.first[:, None] + step) & (position < self.lengths[:, None] - 1)


class UnrolledAttend:
    """Attention of all sequences and steps of a batch; see the drawing above. Called once per step, in order.

    Args:
        sequences: B.
        scale: of the scores.
        window: tokens a query sees; None is all.
    """

    def __init__(self, sequences: int, scale: float, window: int | None) -> None:
        self._sequences = sequences
        self._scale = scale
        self._window = window
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B * L, H, D], k and v [B * L, G, D] -> [B * L, H, D]."""
        queries, keys, values = (x.unflatten(0, (self._sequences, -1)).transpose(1, 2) for x in (q, k, v))
        repeats = queries.shape[1] // keys.shape[1]
        self._keys.append(keys.repeat_interleave(repeats, 1))  # [B, H, L, D]
        self._values.append(values.repeat_interleave(repeats, 1))
        allowed = self._allowed(queries.shape[2], q.device)
        all_keys, all_values = torch.cat(self._keys, 2), torch.cat(self._values, 2)
        with unplanned():
            out = F.scaled_dot_product_attention(queries, all_keys, all_values, allowed, scale=self._scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _allowed(self, length: int, device: torch.device) -> Tensor:
        """[L, steps * L] bool."""
        step = len(self._keys) - 1
        position = torch.arange(length, device=device)
        distance = position[:, None] - position  # [L, L]
        window = self._window or length
        # A query whose chain would begin before the text sees one key, so that nothing is not a number; it never counts.
        first = (distance >= step) & (distance < window) | (position[:, None] < step) & (position == 0)
        return torch.cat([first, *(distance == step - later for later in range(1, step + 1))], 1)


def unroll(head: EagleHead, batch: Sequences, steps: int, known: Tensor | None = None) -> list[Tensor]:
    """The head's hidden states [B, L, C] of every step.

    Args:
        head: with the weights to use.
        batch: the text.
        steps: length of the chains.
        known: [B, L] bool: where the target's hidden state of the token before is known; None: everywhere but at position 0.
    """
    rows, length = batch.ids.shape
    attend = UnrolledAttend(rows, head.config.attention_scale, head.config.layers[0].window)
    positions = torch.arange(length, device=batch.ids.device).repeat(rows)
    before = _shifted(batch.hidden)
    if known is not None:
        before = before * known[..., None]
    states: list[Tensor] = []
    for _ in range(steps):
        state = head.forward(batch.ids.flatten(), before.flatten(0, 1), positions, attend).unflatten(0, (rows, length))
        states.append(state)
        before = _shifted(state)
    return states


def _shifted(hidden: Tensor) -> Tensor:
    """Row p gets what row p - 1 has; row 0 gets zeros."""
    return F.pad(hidden[:, :-1], (0, 0, 1, 0))
