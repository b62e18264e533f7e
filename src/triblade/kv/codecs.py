"""How one key or value vector becomes bytes and back. A codec knows vectors [..., D] only: no block, no layer, no request.

Each vector is encoded on its own, so what is stored does not depend on chunks or neighbours. Planes are those of
`layout.CODEC_PLANES` under the same name.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

INT8_MAX = 127
# Smallest scale that float16 holds as a normal number; keeps an all-zero vector from dividing by zero.
MIN_SCALE = 2.0**-14


class KVCodec(Protocol):
    """Encode and decode vectors of one head."""

    name: str

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., D] -> one tensor per plane, [..., D] or [...]."""
        ...

    def decode(self, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The inverse, as `dtype` [..., D]."""
        ...


class FloatCodec:
    """Keep the numbers in a float type; exact when it is the model's own."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(self._dtype),)

    def decode(self, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return planes[0].to(dtype)


class Int8Codec:
    """Symmetric 8 bits with one float16 scale per token and head: |error| <= scale / 2 = max|x| / 254, up to the scale's rounding."""

    name = "int8"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        # The scale is rounded first and never down, so that the largest number still fits 127 steps of what is stored.
        scale = (x.abs().amax(-1) / INT8_MAX).clamp_min(MIN_SCALE).half()  # [...]
        codes = torch.round(x / scale.float()[..., None]).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        return codes, scale

    def decode(self, planes: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scale = planes
        return (codes * scale.float()[..., None]).to(dtype)


def float32() -> KVCodec:
    """The registry's entry "float32"."""
    return FloatCodec("float32", torch.float32)


def bfloat16() -> KVCodec:
    """The registry's entry "bfloat16"."""
    return FloatCodec("bfloat16", torch.bfloat16)


def float16() -> KVCodec:
    """The registry's entry "float16"."""
    return FloatCodec("float16", torch.float16)


def int8() -> KVCodec:
    """The registry's entry "int8"."""
    return Int8Codec()
