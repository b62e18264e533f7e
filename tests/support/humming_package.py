"""A stand-in for humming-kernels: checks what it is given as the package does, and multiplies with torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Layer:
    """Codes of 4 bits are offset by 8; a scale for each row and group."""

    def __init__(
        self, *, shape_n: int, shape_k: int, weight_config: Mapping[str, Any], torch_dtype: torch.dtype
    ) -> None:
        self._shape, self._group, self._dtype = (shape_n, shape_k), weight_config["group_size"], torch_dtype
        assert weight_config["dtype"] == "int4"
        self._weight: Tensor | None = None
        self.is_ready = False

    def load_from_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        rows, inputs = self._shape
        packed, scales = tensors["weight"], tensors["weight_scale"]
        assert (packed.shape, packed.dtype) == ((rows, inputs // 8), torch.int32)
        assert (scales.shape, scales.dtype) == ((rows, inputs // self._group), self._dtype)
        codes = (packed.unsqueeze(-1) >> 4 * torch.arange(8)) & 15
        groups = codes.view(rows, -1, self._group).float() - 8
        self._weight = (groups * scales.float().unsqueeze(-1)).flatten(1)

    def transform(self) -> None:
        self.is_ready = True

    def __call__(self, x: Tensor) -> Tensor:
        assert self.is_ready
        assert self._weight is not None
        assert x.is_contiguous()
        return (x.float() @ self._weight.T).to(self._dtype)


def humming(layer: Any = Layer) -> dict[str, ModuleType]:
    """Its modules by name."""
    inner: Any = ModuleType("humming.layer")
    inner.HummingLayer = layer
    outer: Any = ModuleType("humming")
    outer.layer = inner
    return {"humming": outer, "humming.layer": inner}
