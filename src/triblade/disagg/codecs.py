"""Which wire codec rows of a link are in: chosen by the sender, request by request, and known to the receiver by what a payload
says.

A lossy codec is watched by its gate: requests that it would harm go in the fallback codec, and when traffic drifts away from a
table, a new one is made and sent ahead of the first rows that need it. The receiver therefore needs no table of its own. Knows no
message and no transport.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from triblade.config import TransferConfig
from triblade.errors import CheckpointError, ConfigError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.kv.wire import Int8Wire, WireCodec, WireSpan
from triblade.kv.wire_gate import AnyWire, WireGate
from triblade.kv.wire_int8_gate import Int8Gate
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_table import KVTable
from triblade.registry import WIRE_CODECS

PLAIN = ("raw", "int8")  # need no table


class RequestWire(Protocol):
    """What encodes the rows of one request."""

    @property
    def errors(self) -> tuple[float, ...]:
        """See `Rows.errors`."""
        ...

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """See `WireCodec`."""
        ...


@dataclass(frozen=True, slots=True)
class _Unwatched:
    """Implements `RequestWire` with a codec that loses nothing."""

    codec: WireCodec
    errors: tuple[float, ...] = ()

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """See `WireCodec`."""
        return self.codec.encode(cache, blocks, span)


class Sender:
    """The codecs of one link, at the end where rows are made.

    Args:
        config: names the codec and its table.
        layout: of the rows.
        receiver: layout of the rows at the other end.

    Raises:
        ConfigError: the codec needs a table and has none, or one of another model.
    """

    def __init__(self, config: TransferConfig, layout: KVLayout, receiver: KVLayout) -> None:
        self.name = config.wire_codec
        self._gate: WireGate | Int8Gate | None = None
        table = None if config.wire_table is None else KVTable.load(config.wire_table)
        self.codec: WireCodec = WIRE_CODECS[self.name](layout, table, receiver.codec)
        raw = WIRE_CODECS["raw"](layout, None, receiver.codec) if layout == receiver else None
        if isinstance(self.codec, PcaLutWire):
            self._gate = WireGate(self.codec, raw or WIRE_CODECS["int8"](layout, None, receiver.codec))
        elif isinstance(self.codec, Int8Wire) and layout.codec != Int8Wire.name:
            limit = math.inf if receiver.codec == Int8Wire.name else config.wire_error_limit
            self._gate = Int8Gate(self.codec, raw, limit)

    @property
    def table(self) -> bytes | None:
        """What the receiver must have; None if it needs none."""
        return self.codec.table.to_bytes() if isinstance(self.codec, PcaLutWire) else None

    @property
    def num_fallbacks(self) -> int:
        """Requests whose rows did not go in the codec."""
        return 0 if self._gate is None else self._gate.counts.fallback_requests

    def request(self) -> RequestWire:
        """For one more request."""
        return _Unwatched(self.codec) if self._gate is None else self._gate.request()

    def refresh(self, send: Callable[[bytes], None]) -> bool:
        """Make a new table where traffic has drifted, send it, and use it; whether that was so. Takes seconds then.

        Raises:
            Exception: whatever fitting it raised; it is not tried again with the same samples.
        """
        if not isinstance(self._gate, WireGate) or not self._gate.has_drifted:
            return False
        try:
            table = self._gate.refreshed()
        except Exception:
            self._gate.forget_samples()
            raise
        send(table.to_bytes())
        self._gate.use(table)
        return True


class Receiver:
    """The codecs of one link, at the end where rows are stored."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._codecs: dict[str, WireCodec] = {name: WIRE_CODECS[name](layout, None, layout.codec) for name in PLAIN}
        self.any = AnyWire(self._codecs)

    def use(self, table: bytes | memoryview) -> None:
        """Decode with this table, as well as with the one before.

        Raises:
            WireError: it is damaged, or of another model.
        """
        try:
            loaded = KVTable.from_bytes(bytes(table))
            known = self._codecs.get(PcaLutWire.name)
            if isinstance(known, PcaLutWire):
                known.use(loaded)
            else:
                self._codecs[PcaLutWire.name] = PcaLutWire(self._layout, loaded, self._layout.codec)
        except (CheckpointError, ConfigError) as error:
            raise WireError(error.message, hint=error.hint) from error
