"""KV rows between two caches: the seam that connectors use, and the two codecs that need no table.

A wire codec is separate from the codec a cache stores with. `raw` copies rows between equal layouts; every other codec needs only
the same model, and the receiver stores what arrives in its own dtype. A token is encoded on its own, so how a prompt is cut into
payloads does not matter. A codec knows no request, no transport and no peer; nothing is stored of a payload that is not whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.kv.wire_frame import FrameKey, WireSpan, codec_of, framed, unframed
from triblade.kv.wire_vectors import (
    DraftBytes,
    VectorBytes,
    block_rows,
    check_span,
    require_length,
    to_bytes,
    to_tensor,
    token_slots,
)

if TYPE_CHECKING:
    from triblade.kv.wire_table import KVTable

__all__ = ["Int8Wire", "RawWire", "WireCodec", "WireSpan", "codec_of"]


class WireCodec(Protocol):
    """Rows to bytes and back."""

    name: str

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """A self-describing payload of the tokens `span` that `blocks` hold."""
        ...

    def decode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan, payload: bytes | memoryview) -> None:
        """Store a payload in reserved rows.

        Raises:
            WireError: it is damaged, or not of these tokens and this model; the rows are as they were.
        """
        ...


class RawWire:
    """Whole rows, byte for byte; both layouts must be equal."""

    name = "raw"

    def __init__(self, layout: KVLayout, table: KVTable | None = None, receiver_dtype: str | None = None) -> None:
        self._key = FrameKey(self.name, layout.fingerprint())

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """See `WireCodec`."""
        check_span(cache, blocks, span)
        if cache.pool.device.type == "cpu":  # without a copy in between
            pool = cache.pool.numpy()
            return framed(self._key, span, len(blocks), [pool[block].data for block in blocks])
        rows = cache.pool.index_select(0, block_rows(cache, blocks))  # [N, row_bytes]
        return framed(self._key, span, len(blocks), [to_bytes(rows)])

    def decode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan, payload: bytes | memoryview) -> None:
        """See `WireCodec`."""
        check_span(cache, blocks, span)
        body = unframed(self._key, span, len(blocks), payload)
        require_length(body, len(blocks) * cache.layout.row_bytes)
        if cache.pool.device.type == "cpu":  # without a copy in between
            cache.pool.numpy()[list(blocks)] = np.frombuffer(body, dtype=np.uint8).reshape(len(blocks), -1)
        else:
            cache.pool.index_copy_(0, block_rows(cache, blocks), to_tensor(body, cache).view(len(blocks), -1))


class Int8Wire:
    """8 bits per number and a float16 scale per vector, as the cache dtype `int8` has them.

    A receiver that stores int8 gets, bit for bit, what it would have stored of the sender's numbers itself, and int8 to int8 loses
    nothing.
    """

    name = "int8"

    def __init__(self, layout: KVLayout, table: KVTable | None = None, receiver_dtype: str | None = None) -> None:
        self._key = FrameKey(self.name, layout.content_fingerprint())
        self._vectors, self._draft = VectorBytes("int8"), DraftBytes()

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """See `WireCodec`."""
        check_span(cache, blocks, span)
        rows = block_rows(cache, blocks)
        vectors = self._vectors.read(cache, cache.layout.target, rows, slice(span.num_tokens))
        pieces = [vectors, *self._draft.read(cache, rows, span.num_tokens)]
        return framed(self._key, span, len(blocks), [to_bytes(piece) for piece in pieces])

    def decode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan, payload: bytes | memoryview) -> None:
        """See `WireCodec`."""
        check_span(cache, blocks, span)
        body = unframed(self._key, span, len(blocks), payload)
        size = self._vectors.size(cache.layout.target, span.num_tokens)
        draft = body[size:]
        require_length(draft, self._draft.size(draft, span.num_tokens, cache.layout))
        slots = token_slots(cache, blocks, span.num_tokens)
        self._vectors.write(cache, cache.layout.target, slots, to_tensor(body[:size], cache))
        self._draft.write(cache, slots, draft)
