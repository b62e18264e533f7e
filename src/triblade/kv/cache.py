"""The pool of KV rows: one byte tensor [num_blocks, row_bytes], and typed views of every plane of every layer into it.

It moves vectors between tokens and slots through a codec. It does not know who owns a block (`engine.block_pool` does).
A slot is block * block_size + offset.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from triblade.kv.arrangement import PLANES, PlaneView
from triblade.kv.codecs import KVCodec
from triblade.kv.layout import KVLayout, Plane
from triblade.registry import KV_CODECS


class KVCache:
    """Rows of encoded keys and values.

    Args:
        layout: bytes of a row.
        num_blocks: rows of the pool.
        dtype: what `read` returns.
        device: where the pool lives.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = dtype
        self._codec: KVCodec = KV_CODECS[layout.codec]()
        self.pool = _zeros(num_blocks, layout.row_bytes, torch.device(device))
        planes = [layout.planes(layer) for layer in range(layout.num_layers)]
        self._keys = [tuple(self._view(plane, "keys") for plane in keys) for keys, _ in planes]
        self._values = [tuple(self._view(plane, "values") for plane in values) for _, values in planes]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Encode keys and values [T, G, D] into slots [T] of a layer."""
        block, offset = slots // self.layout.block_size, slots % self.layout.block_size
        for planes, x in ((self._keys[layer], k), (self._values[layer], v)):
            for plane, encoded in zip(planes, self._codec.encode(x), strict=True):
                plane.write(block, offset, encoded)

    def read(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [S, B], decoded: two tensors [S, B * block_size, G, D]."""
        return self._read(self._keys[layer], block_table), self._read(self._values[layer], block_table)

    def _read(self, planes: tuple[PlaneView, ...], block_table: Tensor) -> Tensor:
        blocks = block_table.flatten()
        encoded = tuple(plane.read(blocks) for plane in planes)  # [S * B * block_size, G, D] or [..., G]
        decoded = self._codec.decode(encoded, self.dtype)
        return decoded.view(block_table.shape[0], -1, *decoded.shape[1:])

    def _view(self, plane: Plane, kind: Literal["keys", "values"]) -> PlaneView:
        """A plane of every block, sharing the pool's memory."""
        typed = self.pool.view(getattr(torch, plane.spec.dtype))  # [num_blocks, row items]
        start = plane.offset_bytes // plane.spec.item_bytes
        items = typed[:, start : start + self.layout.block_size * plane.items_per_token]
        return PLANES[self.layout.arrangement](items, self.layout, kind if plane.spec.per_dimension else "scales")


def _zeros(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Zeros, since masked reads of unwritten slots must not meet NaN. In main memory, pages cost nothing until they are written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, row_bytes), dtype=np.uint8))  # torch.zeros would write them all
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)
