"""The reference in float32 with shapes that never change: a token's bits do not depend on what is computed beside it.

Matrix products are cut into tiles of `TOKEN_TILE` rows (padded), so that the library always runs the same kernel for a row;
attention runs over fixed tiles as well. Slow, and the ground of every equality test.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.ops.attention import tiled_attention
from triblade.ops.backend import Linear
from triblade.ops.reference import ReferenceBackend

TOKEN_TILE = 16
# Rows of other widths begin at odd addresses, where libraries choose kernels by a row's place in the tile.
INPUT_ALIGNMENT = 16


class DeterministicBackend(ReferenceBackend):
    """Batch-invariant float32."""

    name = "deterministic"

    def __init__(self) -> None:
        super().__init__(tiled_attention)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        tokens, inputs = x.shape  # [T, in]
        pad = -inputs % INPUT_ALIGNMENT
        weight = F.pad(linear.weight, (0, pad)) if pad else linear.weight
        padded = F.pad(x, (0, pad, 0, -tokens % TOKEN_TILE))
        tiles = [F.linear(tile, weight, linear.bias) for tile in padded.split(TOKEN_TILE)]
        return torch.cat(tiles)[:tokens]
