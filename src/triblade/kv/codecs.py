"""How one key or value vector becomes bytes and back. A codec knows vectors [..., D] only: no block, no layer, no request.

Each vector is encoded on its own, so what is stored does not depend on chunks or neighbours. Planes are those of
`layout.CODEC_PLANES` under the same name.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

INT8_MAX = 127
# Smallest positive float16; keeps an all-zero vector from dividing by zero.
MIN_SCALE = 2.0**-24
# Half a unit in the last place of float16, relative for normal numbers and absolute for subnormal ones.
HALF_ULP, HALF_ULP_SUBNORMAL = 2.0**-11, 2.0**-25


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
    """Symmetric 8 bits with one float16 scale per token and head: |error| <= max|x| / 254 * (1 + 2^-10) + 2^-25."""

    name = "int8"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.float()
        # The scale is rounded to what is stored first, and never down, so that the largest number still fits 127 steps.
        exact = x.abs().amax(-1) / INT8_MAX  # [...]
        scale = (exact * (1 + HALF_ULP) + HALF_ULP_SUBNORMAL).half().clamp_min(MIN_SCALE)
        codes = torch.round(x / scale.float()[..., None]).to(torch.int8)
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
