"""Where a token's numbers lie within a plane: one after the other, or in tiles that the native kernels read.

A plane view turns the items of a plane [num_blocks, block_size * items per token] into vectors and back. It knows no codec: an item
is whatever the codec stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from torch import Tensor

from triblade.kv.layout import TILE_TOKENS, Arrangement, LayerGroup

PlaneKind = Literal["keys", "values", "scales"]


class PlaneView(Protocol):
    """One plane of one layer, of all blocks."""

    def write(self, block: Tensor, offset: Tensor, encoded: Tensor) -> None:
        """Store [T, G, D] (or [T, G] scales) at offsets [T] of blocks [T]."""
        ...

    def read(self, blocks: Tensor) -> Tensor:
        """[N * block_size, G, D] (or [N * block_size, G]) of blocks [N]."""
        ...


class TokenPlane:
    """Token after token; of each, head after head."""

    def __init__(self, items: Tensor, block_size: int, group: LayerGroup, kind: PlaneKind) -> None:
        self._shape = (group.num_kv_heads,) if kind == "scales" else (group.num_kv_heads, group.head_dim)
        self._items: Tensor = items.unflatten(1, (block_size, -1))  # [num_blocks, block_size, G * D or G]

    @property
    def vectors(self) -> Tensor:
        """[num_blocks, block_size, G, D] (or [num_blocks, block_size, G]) in place."""
        vectors: Tensor = self._items.unflatten(2, self._shape)
        return vectors

    def write(self, block: Tensor, offset: Tensor, encoded: Tensor) -> None:
        self._items[block, offset] = encoded.flatten(1)

    def read(self, blocks: Tensor) -> Tensor:
        # index_select copies whole blocks; plain indexing would go item by item through the row stride.
        return self._items.index_select(0, blocks).view(-1, *self._shape)


class TilePlane:
    """Tiles of 16 tokens of a head. Keys put `n` dimensions of each token side by side, n = 4 bytes / item; values put as many
    tokens of each dimension side by side for int8, and whole vectors for bfloat16.
    """

    def __init__(self, items: Tensor, block_size: int, group: LayerGroup, kind: PlaneKind) -> None:
        heads, dim = group.num_kv_heads, group.head_dim
        tiles = block_size // TILE_TOKENS
        packed = 4 // items.element_size()
        # Axes of a tile, and where token (t) and dimension (d) are among them.
        self._kind, self._packed = kind, packed
        if kind == "scales":
            shape: tuple[int, ...] = (TILE_TOKENS,)
        elif kind == "keys":
            shape = (dim // packed, TILE_TOKENS, packed)
        elif packed == 4:
            shape = (TILE_TOKENS // 4, dim, 4)
        else:
            shape = (TILE_TOKENS, dim)
        self._items: Tensor = items.unflatten(1, (tiles, heads, *shape))

    def write(self, block: Tensor, offset: Tensor, encoded: Tensor) -> None:
        tile, token = offset // TILE_TOKENS, offset % TILE_TOKENS
        if self._kind == "keys":
            self._items[block, tile, :, :, token] = encoded.unflatten(2, (-1, self._packed))
        elif self._kind == "values" and self._packed == 4:
            self._items[block, tile, :, token // 4, :, token % 4] = encoded
        else:
            self._items[block, tile, :, token] = encoded

    def read(self, blocks: Tensor) -> Tensor:
        tiles = self._items.index_select(0, blocks)
        if self._kind == "keys":  # [N, tiles, G, D / n, 16, n]
            return tiles.permute(0, 1, 4, 2, 3, 5).flatten(4).flatten(0, 2)
        if self._kind == "values" and self._packed == 4:  # [N, tiles, G, 4, D, 4]
            return tiles.permute(0, 1, 3, 5, 2, 4).flatten(0, 3)
        return tiles.transpose(2, 3).flatten(0, 2)  # [N, tiles, G, 16, ...]


PLANES: Mapping[Arrangement, type[TokenPlane] | type[TilePlane]] = {"tokens": TokenPlane, "tiles": TilePlane}
