"""Vectors of chosen tokens, of all layers of a cache, as bytes in the form of one KV codec, and into a cache of any codec.

What the wire codecs share: numbers already in that form are copied, others are converted once. Layer after layer come the planes of
the keys, then those of the values; within a plane token after token. Knows no frame and no table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from triblade.errors import WireError
from triblade.kv.cache import Encoded, KVCache
from triblade.kv.codecs import KVCodec
from triblade.kv.layout import CODEC_PLANES, KVLayout, LayerGroup, PlaneSpec
from triblade.kv.wire_frame import WireSpan
from triblade.registry import KV_CODECS

_DRAFT = struct.Struct("<3H")  # layers, heads, head size; all zero: the sender has no drafter with KV of its own
DRAFT_HEADER_BYTES = _DRAFT.size


class VectorBytes:
    """Vectors in the form of the KV codec `name`."""

    def __init__(self, name: str) -> None:
        self._codec: KVCodec = KV_CODECS[name]()
        self._specs = CODEC_PLANES[name]

    def size(self, group: LayerGroup, num_tokens: int) -> int:
        """Bytes of `num_tokens` tokens of all layers."""
        return group.num_layers * 2 * sum(_plane_bytes(spec, group, num_tokens) for spec in self._specs)

    def read(self, cache: KVCache, group: LayerGroup, rows: Tensor, tokens: Tensor | slice) -> Tensor:
        """Tokens (counted from the first one of blocks `rows` [N]) as uint8 [size]."""
        pieces: list[Tensor] = []
        for layer in range(group.num_layers):
            for planes in cache.read_encoded(layer, rows):
                own = self._converted(cache.codec, tuple(plane[tokens] for plane in planes))
                pieces += [_bytes_of(plane) for plane in own]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)

    def write(self, cache: KVCache, group: LayerGroup, slots: Tensor, data: Tensor) -> None:
        """Store uint8 [size] in slots [T] of all layers."""
        start = 0
        for layer in range(group.num_layers):
            both: list[Encoded] = []
            for _ in range(2):
                planes = []
                for spec in self._specs:
                    end = start + _plane_bytes(spec, group, len(slots))
                    planes.append(_typed(data[start:end], spec, group, len(slots)))
                    start = end
                both.append(self._into(cache.codec, tuple(planes)))
            cache.write_encoded(layer, slots, *both)

    def _converted(self, stored_by: KVCodec, planes: Encoded) -> Encoded:
        if stored_by.name == self._codec.name:
            return planes
        return self._codec.encode(stored_by.decode(planes, torch.float32))

    def _into(self, receiver: KVCodec, planes: Encoded) -> Encoded:
        if receiver.name == self._codec.name:
            return planes
        return receiver.encode(self._codec.decode(planes, torch.float32))


def _bytes_of(plane: Tensor) -> Tensor:
    """A plane as uint8 [size]; that of a single token in tiles has gaps between its heads."""
    items = plane.reshape(-1)
    if items.stride(0) != 1:
        items = items.clone(memory_format=torch.contiguous_format)
    return items.view(torch.uint8)


def _plane_bytes(spec: PlaneSpec, group: LayerGroup, num_tokens: int) -> int:
    return num_tokens * group.num_kv_heads * (group.head_dim if spec.per_dimension else 1) * spec.item_bytes


def _typed(data: Tensor, spec: PlaneSpec, group: LayerGroup, num_tokens: int) -> Tensor:
    """Bytes as a plane [T, G, D] or [T, G]."""
    shape = (num_tokens, group.num_kv_heads, group.head_dim) if spec.per_dimension else (num_tokens, group.num_kv_heads)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if data.storage_offset() % spec.item_bytes:  # a view needs aligned bytes
        data = data.clone()
    return data.view(dtype).view(shape)


class DraftBytes:
    """The layers of a drafter within rows, always as int8: they decide how often it guesses right, never which token comes."""

    def __init__(self) -> None:
        self._vectors = VectorBytes("int8")

    def read(self, cache: KVCache, rows: Tensor, num_tokens: int) -> list[Tensor]:
        """Shape and vectors, as uint8 pieces."""
        group = cache.layout.draft
        shape = (0, 0, 0) if group is None else group.shape
        header = torch.tensor(list(_DRAFT.pack(*shape)), dtype=torch.uint8)
        if group is None:
            return [header]
        return [header, self._vectors.read(cache.draft(), group, rows, slice(num_tokens))]

    def size(self, data: memoryview, num_tokens: int, layout: KVLayout) -> int:
        """Bytes that a drafter's part takes at the beginning of `data`.

        Raises:
            WireError: sender and receiver draft with different layers.
        """
        group = self._group(data)
        if group is not None and layout.draft is not None and group.shape != layout.draft.shape:
            raise WireError(
                f"KV rows with a drafter's layers of another shape: {group.shape}, expected {layout.draft.shape}",
                hint="use the same drafter on both sides, or none on the side that prefills",
            )
        return DRAFT_HEADER_BYTES + (0 if group is None else self._vectors.size(group, num_tokens))

    def write(self, cache: KVCache, slots: Tensor, data: memoryview) -> None:
        """Store what both sides have; `data` is exactly the drafter's part."""
        group = self._group(data)
        if group is not None and cache.layout.draft is not None:
            self._vectors.write(cache.draft(), group, slots, to_tensor(data[DRAFT_HEADER_BYTES:], cache))

    def _group(self, data: memoryview) -> LayerGroup | None:
        if len(data) < DRAFT_HEADER_BYTES:
            raise WireError(f"KV rows that end early: {len(data)} bytes where a drafter's part begins")
        layers, heads, dim = _DRAFT.unpack_from(data)
        return LayerGroup(num_layers=layers, num_kv_heads=heads, head_dim=dim) if layers else None


def check_span(cache: KVCache, blocks: Sequence[int], span: WireSpan) -> None:
    """The caller's side of the contract: blocks that hold exactly the tokens, beginning at a block's first one."""
    layout = cache.layout
    assert span.num_tokens > 0, span
    assert span.first_token % layout.block_size == 0, span
    assert layout.blocks_for(span.num_tokens) == len(blocks), (len(blocks), span)
    assert span.positions.stop <= span.num_prompt_tokens, span


def require_length(body: memoryview, expected: int) -> None:
    """Raises:
    WireError: a part of a payload has another length than its contents need.
    """
    if len(body) != expected:
        raise WireError(
            f"KV rows of {len(body)} bytes, expected {expected}", hint="both sides must run the same version"
        )


def read_vectors(cache: KVCache, blocks: Tensor, tokens: range) -> Tensor:
    """Keys and values as they are stored, [L, 2, T, G, D] float32 of tokens (counted from the first one of `blocks`)."""
    group, size = cache.layout.target, cache.layout.block_size
    rows = blocks[tokens.start // size : -(-tokens.stop // size)]
    part = slice(tokens.start % size, tokens.start % size + len(tokens))
    x = torch.empty((group.num_layers, 2, len(tokens), group.num_kv_heads, group.head_dim), device=cache.pool.device)
    for layer in range(group.num_layers):
        for kind, planes in enumerate(cache.read_encoded(layer, rows)):
            x[layer, kind] = cache.codec.decode(tuple(plane[part] for plane in planes), torch.float32)
    return x


def block_rows(cache: KVCache, blocks: Sequence[int]) -> Tensor:
    """Blocks as an index [N] on the cache's device."""
    return torch.tensor(list(blocks), dtype=torch.long, device=cache.pool.device)


def token_slots(cache: KVCache, blocks: Sequence[int], num_tokens: int) -> Tensor:
    """Slots [T] of the first `num_tokens` tokens of blocks."""
    size = cache.layout.block_size
    offsets = torch.arange(size, device=cache.pool.device)
    return (block_rows(cache, blocks)[:, None] * size + offsets).flatten()[:num_tokens]


def to_bytes(data: Tensor) -> memoryview:
    """uint8 [n], from wherever it is."""
    return data.contiguous().view(-1).cpu().numpy().data


def to_tensor(data: memoryview, cache: KVCache) -> Tensor:
    """Bytes as uint8 [n] on the cache's device; a copy, since a payload is read-only."""
    held = torch.empty(len(data), dtype=torch.uint8)
    held.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return held.to(cache.pool.device)
