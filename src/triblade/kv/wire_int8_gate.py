"""The gate of the codec `int8`: how much of sampled keys and values is lost, as shares of them, and a limit of the worst layer.

Finite numbers within the range of the scales lose at most head_dim / (12 * 127^2) of their squared length on average, 3.3e-4 for 64
numbers per head; what is over a limit above that is broken, not merely rough: vectors too small or too large for a float16 scale,
or numbers that are none. A receiver that stores int8 would lose the same of its own rows, so nothing is held back from it. Knows
no table and no drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from triblade.kv.cache import KVCache
from triblade.kv.codecs import KVCodec
from triblade.kv.wire import Int8Wire, WireCodec
from triblade.kv.wire_components import Errors, shares_of
from triblade.kv.wire_frame import WireSpan
from triblade.kv.wire_vectors import block_rows, read_vectors
from triblade.kv.wire_watch import GateCounts, GatedWire
from triblade.registry import KV_CODECS

SAMPLE_TOKENS = 256


class Int8Gate:
    """Implements `wire_watch.Gate`.

    Args:
        codec: encodes.
        fallback: for requests it would harm; None: such rows are not sent.
        limit: largest error of the keys or values of a layer; infinite: only measured.
    """

    def __init__(self, codec: Int8Wire, fallback: WireCodec | None, limit: float = math.inf) -> None:
        self.codec, self.fallback = codec, fallback
        self.counts = GateCounts()
        self._limit = limit
        self._rounding: KVCodec = KV_CODECS["int8"]()

    def request(self) -> GatedWire:
        """The codec of one request."""
        return GatedWire(self, SAMPLE_TOKENS)

    def sampled(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> Errors:
        """See `wire_watch.Gate`; the block in the middle."""
        size, middle = cache.layout.block_size, len(blocks) // 2
        tokens = range(min(size, span.num_tokens - middle * size))
        x = read_vectors(cache, block_rows(cache, blocks[middle : middle + 1]), tokens)  # [L, 2, T, G, D]
        return shares_of(self._rounding.decode(self._rounding.encode(x), torch.float32) - x, x)

    def harm(self, errors: Errors) -> str | None:
        """See `wire_watch.Gate`."""
        if self._limit == math.inf or errors.worst <= self._limit:  # not a number is over every limit
            return None
        return f"int8 loses {errors.worst:.2g} of the keys or values of a layer, the limit is {self._limit:.2g}"
