"""GGUF blocks as integer codes with scales, without a second rounding: Q4_0, Q4_1 and Q8_0.

These are the types whose blocks of 32 are what the native kernels multiply. Others are dequantized by their checkpoint. Layouts: a
Q4 block is a float16 scale, (Q4_1: a float16 minimum,) and 16 bytes of which byte j holds elements j and j + 16.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

from triblade.ops.packing import QuantizedMatrix

BLOCK = 32
KERNEL_TYPES = frozenset((Type.Q4_0, Type.Q4_1, Type.Q8_0))


def quantized_matrix(rows: NDArray[np.uint8], kind: Type) -> QuantizedMatrix | None:
    """Rows of stored blocks [out, bytes] as codes; None for a type that is none of these."""
    if kind == Type.Q8_0:
        blocks = rows.reshape(len(rows), -1, 2 + BLOCK)
        codes = (blocks[..., 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
        return _matrix(codes, _half(blocks[..., :2]), None, 8)
    if kind == Type.Q4_0:
        blocks = rows.reshape(len(rows), -1, 2 + BLOCK // 2)
        return _matrix(_nibbles(blocks[..., 2:]), _half(blocks[..., :2]), None, 4)
    if kind == Type.Q4_1:
        blocks = rows.reshape(len(rows), -1, 4 + BLOCK // 2)
        return _matrix(_nibbles(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]), 4)
    return None


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _half(pair: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(pair).view(np.float16)[..., 0].copy())


def _matrix(codes: NDArray[np.uint8], scales: torch.Tensor, offsets: torch.Tensor | None, bits: int) -> QuantizedMatrix:
    flat = torch.from_numpy(np.ascontiguousarray(codes.reshape(len(codes), -1)))
    return QuantizedMatrix(codes=flat, scales=scales, offsets=offsets, bits=bits)
