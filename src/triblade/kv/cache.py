"""The pool of KV rows: one byte tensor [num_blocks, row_bytes], and typed views of every plane of every layer into it.

It moves vectors between tokens and slots through a codec. It does not know who owns a block (`engine.block_pool` does).
A slot is block * block_size + offset.
"""

from __future__ import annotations

from copy import copy
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from triblade.kv.arrangement import PLANES, PlaneView, TokenPlane
from triblade.kv.codecs import KVCodec
from triblade.kv.layout import KVLayout, Plane
from triblade.registry import KV_CODECS

Encoded: TypeAlias = tuple[Tensor, ...]  # the planes of a codec


class KVCache:
    """Rows of encoded keys and values.

    Args:
        layout: bytes of a row.
        num_blocks: rows of the pool.
        dtype: what `read` returns.
        device: where the pool lives.
        pool: zeros [num_blocks, row_bytes] that are there already, instead of new ones.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pool: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.codec: KVCodec = KV_CODECS[layout.codec]()
        self.pool = _zeros(num_blocks, layout.row_bytes, torch.device(device)) if pool is None else pool
        self.first_layer = 0
        self._keys, self._values = self._views(layout.target.num_layers)

    def draft(self) -> KVCache:
        """The same rows, seen from a drafter: layer 0 is its first."""
        assert self.layout.draft is not None, "the layout has no layers for a drafter"
        other = copy(self)
        other.first_layer = self.layout.num_layers
        other._keys, other._values = other._views(self.layout.draft.num_layers)
        return other

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Encode keys and values [T, G, D] into slots [T] of a layer."""
        self.write_encoded(layer, slots, self.codec.encode(k), self.codec.encode(v))

    def write_encoded(self, layer: int, slots: Tensor, keys: Encoded, values: Encoded) -> None:
        """Store what this cache's codec made of keys and values, planes [T, G, D] or [T, G], in slots [T] of a layer."""
        block, offset = slots // self.layout.block_size, slots % self.layout.block_size
        for planes, x in ((self._keys[layer], keys), (self._values[layer], values)):
            for plane, encoded in zip(planes, x, strict=True):
                plane.write(block, offset, encoded)

    def read(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks [S, B], decoded: two tensors [S, B * block_size, G, D]."""
        return self._read(self._keys[layer], block_table), self._read(self._values[layer], block_table)

    def read_encoded(self, layer: int, blocks: Tensor) -> tuple[Encoded, Encoded]:
        """Keys and values of blocks [N] as they are stored: planes [N * block_size, G, D] or [N * block_size, G]."""
        keys, values = self._keys[layer], self._values[layer]
        return tuple(plane.read(blocks) for plane in keys), tuple(plane.read(blocks) for plane in values)

    @property
    def stores_vectors(self) -> bool:
        """Whether keys and values lie in the pool as they are, token after token."""
        planes, _ = self.layout.planes(self.first_layer)
        return len(planes) == 1 and self.layout.arrangement == "tokens"

    def vectors(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [num_blocks, block_size, G, D] in place, where `stores_vectors`."""
        (keys,), (values,) = self._keys[layer], self._values[layer]
        assert isinstance(keys, TokenPlane)
        assert isinstance(values, TokenPlane)
        return keys.vectors, values.vectors

    def _read(self, planes: tuple[PlaneView, ...], block_table: Tensor) -> Tensor:
        blocks = block_table.flatten()
        encoded = tuple(plane.read(blocks) for plane in planes)  # [S * B * block_size, G, D] or [..., G]
        decoded = self.codec.decode(encoded, self.dtype)
        return decoded.view(block_table.shape[0], -1, *decoded.shape[1:])

    def _views(self, num_layers: int) -> tuple[list[tuple[PlaneView, ...]], list[tuple[PlaneView, ...]]]:
        """The planes of the keys and of the values, by layer."""
        keys, values = [], []
        for layer in range(self.first_layer, self.first_layer + num_layers):
            key_planes, value_planes = self.layout.planes(layer)
            keys.append(tuple(self._view(plane, layer, "keys") for plane in key_planes))
            values.append(tuple(self._view(plane, layer, "values") for plane in value_planes))
        return keys, values

    def _view(self, plane: Plane, layer: int, kind: Literal["keys", "values"]) -> PlaneView:
        """A plane of every block, sharing the pool's memory."""
        typed = self.pool.view(getattr(torch, plane.spec.dtype))  # [num_blocks, row items]
        start = plane.offset_bytes // plane.spec.item_bytes
        items = typed[:, start : start + self.layout.block_size * plane.items_per_token]
        make = PLANES[self.layout.arrangement]
        return make(
            items, self.layout.block_size, self.layout.group(layer), kind if plane.spec.per_dimension else "scales"
        )


def _zeros(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Zeros, since masked reads of unwritten slots must not meet NaN. In main memory, pages cost nothing until they are written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, row_bytes), dtype=np.uint8))  # torch.zeros would write them all
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)
