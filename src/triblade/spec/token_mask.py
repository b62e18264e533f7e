"""Sets of tokens as bits: what a constraint lets come next, 32 times smaller than a truth value for each token.

A mask is int32 [ceil(V / 32)] in main memory; bit i of word w stands for token 32 w + i. This is the form in which grammars make
them and in which native kernels read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

WORD_BITS = 32


def packed(allowed: Tensor) -> Tensor:
    """The mask of truth values, bool [V]."""
    bits = np.packbits(np.pad(allowed.numpy(), (0, -len(allowed) % WORD_BITS)), bitorder="little")
    return torch.from_numpy(bits.view(np.int32))


def unpacked(masks: Tensor, size: int) -> Tensor:
    """Truth values, bool [..., size], of masks [..., W], where the masks are."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=masks.device)
    return (masks.unsqueeze(-1) >> shifts).bitwise_and_(1).bool().flatten(-2)[..., :size]


def has_token(mask: Tensor, token_id: int) -> bool:
    """Whether a token is in the mask."""
    word: int = mask[token_id // WORD_BITS].item()  # type: ignore[assignment]
    return bool(word >> token_id % WORD_BITS & 1)


def has_any(mask: Tensor, token_ids: Sequence[int]) -> bool:
    """Whether one of these tokens is in the mask."""
    return any(has_token(mask, token) for token in token_ids)
