"""The gate of a codec with a table: a limit per request, over time a drift and new tables.

The limit is a multiple of the error that the table had when it was made. Sampled tokens are kept in moments; when recent errors lie
well above that, the table can be made anew from them, without a restart. Knows no transport: the worker sends a new table, and then
tells the gate to use it. What becomes of a request over the limit stands in `wire_watch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from triblade.errors import ConfigError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.calibration_fit import refit_table
from triblade.kv.calibration_statistics import KVStatistics, Reservoir
from triblade.kv.wire import WireCodec
from triblade.kv.wire_components import Components, Errors
from triblade.kv.wire_frame import WireSpan, codec_of
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_table import KVTable
from triblade.kv.wire_watch import GateCounts, GatedWire

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


class WireGate:
    """Implements `wire_watch.Gate` for a codec with a table.

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
        return GatedWire(self, self.limits.sample_tokens)

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
        """See `Gate`; it is remembered for the drift."""
        sample = self.codec.sample(cache, blocks, span)
        if sample is None:
            return None
        errors = self.codec.errors(sample)
        self._recent.add(sample, errors)
        return errors

    def harm(self, errors: Errors) -> str | None:
        """See `Gate`."""
        limit = self.limits.request * self._own_nats
        if errors.nats <= limit:
            return None
        return f"KV error of {errors.nats:.2g} nats per token, the limit is {limit:.2g}"


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
