"""Watches what a lossy codec does to real traffic: per request a limit and a fallback, over time a drift and new tables.

Sampled blocks are encoded and decoded where both sides are known: at the sender. Over the limit, that payload and the rest of its
request go as the fallback codec makes them. Sampled tokens are kept in moments; when recent errors lie well above what the table
had when it was made, it can be made anew from them, without a restart. Knows no transport: the worker sends a new table, and then
tells the gate to use it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from triblade.errors import ConfigError, NumericalError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.calibration_fit import refit_table
from triblade.kv.calibration_statistics import KVStatistics, Reservoir
from triblade.kv.wire import WireCodec
from triblade.kv.wire_components import Components, Errors
from triblade.kv.wire_frame import WireSpan, codec_of
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_table import KVTable

log = logging.getLogger(__name__)

_HELD_OUT = 8  # of so many samples one is only for measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """Errors are multiples of the table's own, as it was measured on text that was held out when it was made.

    Attributes:
        request: over this in a payload, the request is not sent with the table.
        drift: over this in the recent average, the traffic is no longer like what the table was made from.
        sample_tokens: a block is sampled of as many tokens of a request, and of its first payload.
        memory_tokens: sampled tokens after which an error counts half in the recent average.
        refresh_tokens: sampled tokens that a new table needs at least.
    """

    request: float = 4.0
    drift: float = 1.5
    sample_tokens: int = 256
    memory_tokens: int = 2048
    refresh_tokens: int = 2048

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 1 < self.drift <= self.request:
            raise ConfigError(
                f"limits must be 1 < drift <= request, got: {self.drift}, {self.request}", param="kv_limits"
            )


@dataclass(slots=True)
class GateCounts:
    """For metrics."""

    payloads: int = 0
    fallback_payloads: int = 0
    fallback_requests: int = 0
    refreshes: int = 0
    last_error: Errors | None = None


class WireGate:
    """A codec with a table, watched.

    Args:
        codec: encodes.
        fallback: for requests it would harm.
        limits: of errors.

    Raises:
        ConfigError: the table does not say how large its own errors are.
    """

    def __init__(self, codec: PcaLutWire, fallback: WireCodec, limits: GateLimits | None = None) -> None:
        self.codec, self.fallback = codec, fallback
        self.limits = limits or GateLimits()
        self.counts = GateCounts()
        self._own_nats = own_nats(codec.table)
        self._recent = _Recent(codec.table, self.limits)

    def request(self) -> GatedWire:
        """The codec of one request."""
        return GatedWire(self)

    @property
    def recent_error(self) -> float:
        """Recent errors as a multiple of the table's own."""
        return self._recent.nats / self._own_nats

    @property
    def has_drifted(self) -> bool:
        """Whether a new table would serve the recent traffic better, and enough of it was seen to make one."""
        enough = self._recent.num_tokens >= self.limits.refresh_tokens
        return enough and self.recent_error > self.limits.drift

    def refreshed(self) -> KVTable:
        """A table for the recent traffic, of the same size, with the errors it has there; seconds of work, changing nothing yet."""
        return self._recent.refit()

    def forget_samples(self) -> None:
        """Begin to watch for drift anew."""
        self._recent = _Recent(self.codec.table, self.limits)

    def use(self, table: KVTable) -> None:
        """Encode with a table that the receivers have by now."""
        self.codec.use(table)
        self._own_nats = own_nats(table)
        self.forget_samples()
        self.counts.refreshes += 1

    def sampled(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> Errors | None:
        """How far a sampled block of these tokens comes back off; it is remembered for the drift. None: all of them are exact."""
        sample = self.codec.sample(cache, blocks, span)
        if sample is None:
            return None
        errors = self.counts.last_error = self.codec.errors(sample)
        self._recent.add(sample, errors)
        return errors

    def is_harm(self, errors: Errors) -> bool:
        """Whether a payload with such errors is not to be sent."""
        limit = self.limits.request * self._own_nats
        if errors.nats > limit:
            log.info(
                "KV error of %.2g nats per token, the limit is %.2g: sending %s", errors.nats, limit, self.fallback.name
            )
        return errors.nats > limit


class GatedWire:
    """The codec of one request: the watched one until it would do harm, then its fallback. The sender's side of `WireCodec`."""

    def __init__(self, gate: WireGate) -> None:
        self._gate = gate
        self._codec: WireCodec = gate.codec
        self._unseen: int | None = None  # tokens since the last sample
        self._samples: list[Errors] = []

    @property
    def name(self) -> str:
        return self._codec.name

    @property
    def errors(self) -> tuple[float, ...]:
        """Mean over the samples of what was encoded with loss, of keys and of values; see `Errors`. Empty without a sample."""
        count = len(self._samples)
        pairs = [(errors.keys, errors.values) for errors in self._samples]
        return tuple(sum(column) / count for column in zip(*pairs, strict=True))

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """See `WireCodec`."""
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
        counts.fallback_payloads += 1
        return self._codec.encode(cache, blocks, span)

    def _harms(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bool:
        errors = self._gate.sampled(cache, blocks, span)
        if errors is None:
            return False
        if self._gate.is_harm(errors):
            return True
        self._samples.append(errors)
        return False

    def _is_due(self, span: WireSpan) -> bool:
        """Whether it is time for a sample."""
        due = self._unseen is None or self._unseen >= self._gate.limits.sample_tokens
        self._unseen = span.num_tokens if due or self._unseen is None else self._unseen + span.num_tokens
        return due


class AnyWire:
    """The receiver's side: whichever of its codecs a payload names.

    Args:
        codecs: by name.
    """

    def __init__(self, codecs: Mapping[str, WireCodec]) -> None:
        self._codecs = codecs

    def decode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan, payload: bytes | memoryview) -> None:
        """See `WireCodec`."""
        name = codec_of(payload)
        if name not in self._codecs:
            raise WireError(f"KV rows of the codec {name!r}, expected one of: {', '.join(self._codecs)}")
        self._codecs[name].decode(cache, blocks, span, payload)


class _Recent:
    """Moments and errors of sampled tokens since a table came into use."""

    def __init__(self, table: KVTable, limits: GateLimits) -> None:
        layers, _, width = table.mean.shape
        self._table, self._memory = table, limits.memory_tokens
        self._fitted = KVStatistics(layers, width, limits.refresh_tokens)
        self._held_out = Reservoir(layers, width, limits.refresh_tokens // _HELD_OUT)
        self.num_tokens = self._num_samples = 0
        self._weight = self._sum = 0.0

    @property
    def nats(self) -> float:
        """Average error, recent tokens counting more."""
        return self._sum / self._weight if self._weight else 0.0

    def add(self, sample: Tensor, errors: Errors) -> None:
        """Tokens [L, 2, T, C]."""
        tokens = sample.shape[2]
        keep = 0.5 ** (tokens / self._memory)
        self._weight, self._sum = self._weight * keep + tokens, self._sum * keep + tokens * errors.nats
        self.num_tokens += tokens
        self._num_samples += 1
        kept = self._held_out if self._num_samples % _HELD_OUT == 0 else self._fitted
        kept.add(sample.cpu())

    def refit(self) -> KVTable:
        """A table from the sampled tokens, measured on those that were held out."""
        table = refit_table(self._table, self._fitted.moments())
        held_out = self._held_out.tokens().float()
        return replace(table, figures=asdict(Components(table, held_out.device).errors(held_out)))


def own_nats(table: KVTable) -> float:
    """The error that a table has on text like that it was made from, in nats per token.

    Raises:
        ConfigError: it does not say.
    """
    nats = table.figures.get("nats", 0.0)
    if not nats > 0:
        raise ConfigError(
            "the KV table does not say how large its errors are", hint="make it with triblade kv-calibrate"
        )
    return nats
