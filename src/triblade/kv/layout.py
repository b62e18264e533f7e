"""How many bytes a KV block has and what lies where: one row holds `block_size` tokens of all layers, encoded.

Pure arithmetic, no tensor; nobody else computes a byte of the cache. Within a row the layers follow each other, those of a draft
model behind the target's, so that whoever shares, evicts or sends a block does it for both. Within a layer come the planes of the
keys, then those of the values; within a plane the tokens, then the heads:

    row   [ layer 0 | layer 1 | ... | draft layer 0 | ... ]   each layer begins at a multiple of 64 bytes
    layer [ K values | V values | K scales | V scales ]       fp codecs have values only
    plane [ token 0: head 0, head 1, ... | token 1: ... ]     arrangement "tokens"
          [ tile 0: head 0, head 1, ... | tile 1: ... ]       arrangement "tiles": 16 tokens of a head, in the order of the
                                                              dot instructions (see csrc/kernels.h)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

ALIGNMENT_BYTES = 64
TILE_TOKENS = 16
# Fields that say what rows mean; the others say how they are stored.
CONTENT_FIELDS = ("num_layers", "num_kv_heads", "head_dim", "block_size", "model_hash", "rope")

Arrangement = Literal["tokens", "tiles"]


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """A field that a codec stores per token and head."""

    dtype: str  # name of a torch dtype
    item_bytes: int
    per_dimension: bool  # one item per head dimension, or one per head


CODEC_PLANES: Mapping[str, tuple[PlaneSpec, ...]] = {
    "float32": (PlaneSpec("float32", 4, True),),
    "bfloat16": (PlaneSpec("bfloat16", 2, True),),
    "float16": (PlaneSpec("float16", 2, True),),
    "int8": (PlaneSpec("int8", 1, True), PlaneSpec("float16", 2, False)),
}


@dataclass(frozen=True, slots=True)
class Plane:
    """Where one plane of one layer lies within a row."""

    spec: PlaneSpec
    offset_bytes: int
    items_per_token: int  # num_kv_heads * (head_dim or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of equal shape."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    model_hash: str = ""  # of a drafter: what computes them

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, heads and dimensions."""
        return self.num_layers, self.num_kv_heads, self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The layout of one pool; equal layouts with equal `model_hash` may exchange rows."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    codec: str  # a key of CODEC_PLANES
    arrangement: Arrangement = "tokens"  # "tiles" needs whole tiles of 16 tokens in a block
    draft: LayerGroup | None = None  # of a drafter with KV of its own; its layers are counted on from the target's
    model_hash: str = ""
    weights: str = ""  # how the model's weights are held: other roundings compute other rows
    rope: str = ""

    @property
    def target(self) -> LayerGroup:
        return LayerGroup(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def group(self, layer: int) -> LayerGroup:
        """The shape of a layer."""
        if layer < self.num_layers or self.draft is None:
            return self.target
        return self.draft

    def layer_bytes(self, layer: int = 0) -> int:
        """Bytes of one layer in a row, padding included."""
        return _aligned(sum(self._plane_bytes(spec, layer) for spec in self._specs()))

    @property
    def row_bytes(self) -> int:
        """Bytes of one block."""
        draft = 0 if self.draft is None else self.draft.num_layers * self.layer_bytes(self.num_layers)
        return self.num_layers * self.layer_bytes() + draft

    def planes(self, layer: int) -> tuple[tuple[Plane, ...], tuple[Plane, ...]]:
        """The planes of a layer's keys and of its values."""
        offset = min(layer, self.num_layers) * self.layer_bytes()
        offset += max(0, layer - self.num_layers) * self.layer_bytes(layer)
        found: list[Plane] = []
        for spec in self._specs():
            found.append(Plane(spec, offset, self._items_per_token(spec, layer)))
            offset += self._plane_bytes(spec, layer)
        return tuple(found[0::2]), tuple(found[1::2])

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> str:
        """Identity of everything a receiver of rows must agree on (hex)."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def content_fingerprint(self) -> str:
        """Identity of what the rows mean, however they are encoded (hex): for senders and receivers that encode for themselves."""
        content = {name: getattr(self, name) for name in CONTENT_FIELDS}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def difference(self, other: KVLayout, *, content_only: bool = False) -> str | None:
        """The first field in which two layouts differ, as `name: mine, theirs`; None if they may exchange rows (or content)."""
        names = CONTENT_FIELDS if content_only else tuple(field.name for field in fields(self))
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r}, {theirs!r}"
        return None

    def _specs(self) -> tuple[PlaneSpec, ...]:
        """Keys and values alternate, so that equal item sizes lie together."""
        return tuple(spec for spec in CODEC_PLANES[self.codec] for _ in ("keys", "values"))

    def _items_per_token(self, spec: PlaneSpec, layer: int) -> int:
        group = self.group(layer)
        return group.num_kv_heads * (group.head_dim if spec.per_dimension else 1)

    def _plane_bytes(self, spec: PlaneSpec, layer: int) -> int:
        return self.block_size * self._items_per_token(spec, layer) * spec.item_bytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
