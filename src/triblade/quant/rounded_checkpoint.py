"""A checkpoint whose matrices are rounded to nearest as they are read: what `quantization` at load means without kernels for it.

Same rounding as `packed_weights`, embedding and head at no less than 8 bits included. Knows no executor and no bytes: nothing gets
smaller, only coarser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from triblade.models.checkpoint import Checkpoint
from triblade.quant.packed_weights import group_for
from triblade.quant.rtn import round_to_nearest

TABLE_BITS = 8
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


class RoundedCheckpoint:
    """Implements `Checkpoint`.

    Args:
        original: any checkpoint.
        bits: 4 or 8, of the matrices of the layers.
    """

    def __init__(self, original: Checkpoint, bits: int) -> None:
        self._original = original
        self._bits = bits

    @property
    def config(self) -> Mapping[str, Any]:
        return self._original.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._original.generation_config

    @property
    def dtype(self) -> torch.dtype:
        return self._original.dtype

    @property
    def size_bytes(self) -> int:
        return self._original.size_bytes

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self._original.names()

    def tensor(self, name: str) -> Tensor:
        """A matrix as the kernels would multiply it, in float32; anything else as stored."""
        tensor = self._original.tensor(name)
        if tensor.ndim != 2:
            return tensor
        bits = max(self._bits, TABLE_BITS) if name in _TABLES else self._bits
        return round_to_nearest(tensor, bits, group_for(tensor.shape[1])).dequantize()

    def release(self) -> None:
        """See `Checkpoint`."""
        self._original.release()

    def fingerprint(self) -> str:
        """That of the original with the bits."""
        return f"{self._original.fingerprint()}-rtn{self._bits}"
