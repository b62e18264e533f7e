"""Whether the rows of one worker mean the same to another: their layouts field by field, then one canary row.

The canary is a block of known keys and values that a prefill worker writes and encodes like any other. The decode worker decodes
it into a block of its own and reads it, so that whatever the layouts do not say (byte order, arrangement, a codec's version)
shows before the first request and not in its answer. Both use a pool of one block beside the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor

from triblade.errors import WireError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout, LayerGroup
from triblade.kv.wire import WireCodec, WireSpan

# An 8-bit step of the largest canary value, twice over: once on the wire, once in the cache.
TOLERANCE = 2 * 4.0 / 127


def described(layout: KVLayout) -> dict[str, Any]:
    """A layout as it goes over the wire."""
    return asdict(layout)


def layout_from(fields: Mapping[str, Any]) -> KVLayout:
    """The layout that a peer described.

    Raises:
        WireError: it is none.
    """
    try:
        draft = fields.get("draft")
        return KVLayout(**{**fields, "draft": LayerGroup(**draft) if draft else None})
    except TypeError as error:
        raise WireError(f"the peer's KV layout has other fields: {error}", hint="run equal versions") from error


def why_not(prefill: KVLayout, decode: KVLayout, prefill_codec: str, decode_codec: str) -> str | None:
    """What keeps two workers from exchanging rows, as `field: prefill's, decode's`; None if nothing does."""
    if prefill_codec != decode_codec:
        return f"codec on the wire: {prefill_codec}, {decode_codec}"
    return prefill.difference(decode, content_only=prefill_codec != "raw")


def canary(cache: KVCache, codec: WireCodec) -> bytes:
    """The canary row of a worker with such a cache, encoded."""
    block_size = cache.layout.block_size
    return codec.encode(canary_block(cache), [0], WireSpan(0, block_size, block_size))


def canary_block(cache: KVCache) -> KVCache:
    """A cache of one block, the canary."""
    own, block_size = one_block(cache), cache.layout.block_size
    slots = torch.arange(block_size, device=own.pool.device)
    for part, group in _parts(own):
        for layer in range(group.num_layers):
            part.write(layer, slots, *_known(layer, block_size, group, own))
    return own


class Decodes(Protocol):
    """The receiving half of a `WireCodec`."""

    def decode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan, payload: bytes | memoryview) -> None:
        """See `WireCodec`."""
        ...


def check_canary(cache: KVCache, codec: Decodes, payload: bytes | memoryview) -> None:
    """Raises:
    WireError: the canary does not read as what was written, naming the layer.
    """
    own, block_size = one_block(cache), cache.layout.block_size
    codec.decode(own, [0], WireSpan(0, block_size, block_size), payload)
    compare_canary(own)


def compare_canary(own: KVCache) -> None:
    """Raises:
    WireError: the one block of this cache does not read as the canary.
    """
    block_size = own.layout.block_size
    table = torch.zeros(1, 1, dtype=torch.long, device=own.pool.device)
    for layer in range(own.layout.num_layers):
        known = _known(layer, block_size, own.layout.target, own)
        for name, expected, found in zip(("keys", "values"), known, own.read(layer, table), strict=True):
            worst = float((found[0].float() - expected.float()).abs().max())
            if not worst <= TOLERANCE:
                raise WireError(
                    f"the canary row differs: {name} of layer {layer} by {worst:.3g}", hint="run equal versions"
                )


def one_block(cache: KVCache) -> KVCache:
    """A cache of one empty block, of the same kind."""
    return KVCache(cache.layout, 1, cache.dtype, cache.pool.device)


def _parts(cache: KVCache) -> list[tuple[KVCache, LayerGroup]]:
    """The target's layers, and a drafter's where there are some."""
    draft = cache.layout.draft
    return [(cache, cache.layout.target), *([] if draft is None else [(cache.draft(), draft)])]


def _known(layer: int, num_tokens: int, group: LayerGroup, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Keys and values [T, G, D] within [-4, 4], all different within a few hundred, exact in every float type."""
    count = num_tokens * group.num_kv_heads * group.head_dim
    index = torch.arange(count, device=cache.pool.device)
    shape = (num_tokens, group.num_kv_heads, group.head_dim)
    keys = ((index * 37 + layer * 11) % 257 - 128).float() / 32
    values = ((index * 53 + layer * 7 + 101) % 257 - 128).float() / 32
    return keys.view(shape).to(cache.dtype), values.view(shape).to(cache.dtype)
