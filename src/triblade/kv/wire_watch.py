"""What happens to a request whose rows a lossy codec would harm: sampled blocks, a limit, a fallback. Knows no codec by name.

Sampled blocks are encoded and decoded where both sides are known: at the sender. Over the limit, that payload and the rest of its
request go as the fallback codec makes them; without one they do not go at all, and the receiver computes the rows itself. What the
samples lost goes along with the rows, so that the error of every request can be seen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triblade.errors import NumericalError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.wire import WireCodec
from triblade.kv.wire_components import Errors
from triblade.kv.wire_frame import WireSpan

log = logging.getLogger(__name__)


@dataclass(slots=True)
class GateCounts:
    """For metrics."""

    payloads: int = 0
    fallback_payloads: int = 0
    fallback_requests: int = 0
    refreshes: int = 0
    last_error: Errors | None = None


class Gate(Protocol):
    """Decides how far off rows of one link may come back."""

    counts: GateCounts

    @property
    def codec(self) -> WireCodec:
        """Encodes."""
        ...

    @property
    def fallback(self) -> WireCodec | None:
        """For requests it would harm."""
        ...

    def sampled(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> Errors | None:
        """How far a sampled block of these tokens comes back off. None: all of them are exact."""
        ...

    def harm(self, errors: Errors) -> str | None:
        """Why a payload with such errors is not to be sent; None: it may go."""
        ...


class GatedWire:
    """The codec of one request: the watched one until it would do harm, then its fallback. The sender's side of `WireCodec`.

    Args:
        gate: decides.
        sample_tokens: a block is sampled of as many tokens, and of the first payload.
    """

    def __init__(self, gate: Gate, sample_tokens: int) -> None:
        self._gate, self._sample_tokens = gate, sample_tokens
        self._codec: WireCodec | None = gate.codec  # None: nothing may be sent
        self._unseen: int | None = None  # tokens since the last sample
        self._samples: list[Errors] = []

    @property
    def name(self) -> str:
        return "none" if self._codec is None else self._codec.name

    @property
    def errors(self) -> tuple[float, ...]:
        """Mean over the samples of what was encoded with loss, of keys and of values; see `Errors`. Empty without a sample."""
        count = len(self._samples)
        pairs = [(errors.keys, errors.values) for errors in self._samples]
        return tuple(sum(column) / count for column in zip(*pairs, strict=True))

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """See `WireCodec`.

        Raises:
            WireError: the codec would harm this request, and there is no other.
        """
        counts = self._gate.counts
        counts.payloads += 1
        if self._codec is self._gate.codec:
            try:
                if not (self._is_due(span) and self._harms(cache, blocks, span)):
                    return self._codec.encode(cache, blocks, span)
            except NumericalError as error:  # the receiver is to see what there is
                log.warning("%s", error.message)
            self._codec = self._gate.fallback
            counts.fallback_requests += 1
        if self._codec is None:
            raise WireError(
                f"the codec {self._gate.codec.name} would change the rows too much",
                hint="give both workers the same KV dtype, so that they can go raw",
            )
        counts.fallback_payloads += 1
        return self._codec.encode(cache, blocks, span)

    def _harms(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bool:
        errors = self._gate.counts.last_error = self._gate.sampled(cache, blocks, span)
        if errors is None:
            return False
        if (reason := self._gate.harm(errors)) is not None:
            log.info("%s: sending %s", reason, "nothing" if self._gate.fallback is None else self._gate.fallback.name)
            return True
        self._samples.append(errors)
        return False

    def _is_due(self, span: WireSpan) -> bool:
        """Whether it is time for a sample."""
        due = self._unseen is None or self._unseen >= self._sample_tokens
        self._unseen = span.num_tokens if due or self._unseen is None else self._unseen + span.num_tokens
        return due
