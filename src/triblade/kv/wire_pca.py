"""The codec `pca-lut`: keys before the rotary embedding, and values, as codes of their components (see `wire_components`).

    payload  [ table | form of exact tokens | exact tokens at the beginning | codes | exact tokens at the end | drafter's layers ]

The first and last tokens of a prompt travel as they are: as int8 where the receiver stores no more than that, else in the sender's
own dtype. The receiver turns keys with the positions of the span and stores through its own codec. Payloads name their table, so
that a refreshed one can take over while payloads of the old one are on their way. Knows no request and no transport.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triblade.errors import ConfigError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.layout import CODEC_PLANES, KVLayout
from triblade.kv.wire_components import Components, Errors
from triblade.kv.wire_frame import FrameKey, WireSpan, framed, unframed
from triblade.kv.wire_packing import Packing
from triblade.kv.wire_rotation import Rotation
from triblade.kv.wire_table import KVTable
from triblade.kv.wire_vectors import (
    DraftBytes,
    VectorBytes,
    block_rows,
    check_span,
    read_vectors,
    require_length,
    to_bytes,
    to_tensor,
    token_slots,
)

_ABOUT = struct.Struct("<8sB")  # table, form of exact tokens
_FORMS = tuple(sorted(CODEC_PLANES))
_TABLES = 2  # that a receiver knows: the newest, and the one before
_TOKENS_AT_ONCE = 256  # bounds what unpacked numbers take, so that they stay in the caches


@dataclass(frozen=True, slots=True)
class _Ranges:
    """Tokens of a span, counted from its first: exact, coded, exact."""

    coded: range
    num_tokens: int

    @classmethod
    def of(cls, table: KVTable, span: WireSpan) -> _Ranges:
        start = min(max(table.exact_first - span.first_token, 0), span.num_tokens)
        end = span.num_prompt_tokens - table.exact_last - span.first_token
        return cls(range(start, min(max(end, start), span.num_tokens)), span.num_tokens)

    @property
    def exact(self) -> tuple[range, range]:
        return range(self.coded.start), range(self.coded.stop, self.num_tokens)


class _Coder:
    """A table made ready, on the device that first asks."""

    def __init__(self, table: KVTable) -> None:
        self.table = table
        self.fingerprint = table.fingerprint()
        self.packing = Packing.of(table.bits[table.bits > 0].numpy())
        self._components: Components | None = None

    def components(self, device: torch.device) -> Components:
        """Its arithmetic where the caches are."""
        if self._components is None:
            self._components = Components(self.table, device)
        return self._components


class PcaLutWire:
    """See the top of this file.

    Args:
        layout: of the caches.
        table: newest one.
        receiver_dtype: KV dtype of the other side's cache, where it is known.

    Raises:
        ConfigError: there is no table, or it is of another model.
    """

    name = "pca-lut"

    def __init__(
        self,
        layout: KVLayout,
        table: KVTable | None = None,
        receiver_dtype: str | None = None,
    ) -> None:
        if table is None:
            raise ConfigError("the KV codec pca-lut needs a table", hint="make one with triblade kv-calibrate")
        self._layout = layout
        self._key = FrameKey(self.name, layout.content_fingerprint())
        self._exact = "int8" if receiver_dtype == "int8" else layout.codec
        self._rotation = Rotation(layout.rope)
        self._draft = DraftBytes()
        self._coders: tuple[_Coder, ...] = ()
        self.use(table)

    @property
    def table(self) -> KVTable:
        """That rows are encoded with."""
        return self._coders[0].table

    def use(self, table: KVTable) -> None:
        """Encode with another table from now on, and decode with it as well as with the one before."""
        table.require_model(self._layout)
        self._coders = (_Coder(table), *self._coders)[:_TABLES]

    def encode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> bytes:
        """See `WireCodec`."""
        check_span(cache, blocks, span)
        coder, rows = self._coders[0], block_rows(cache, blocks)
        ranges = _Ranges.of(coder.table, span)
        exact = VectorBytes(self._exact)
        before, after = (exact.read(cache, cache.layout.target, rows, as_slice(part)) for part in ranges.exact)
        draft = self._draft.read(cache, rows, span.num_tokens)
        pieces: list[bytes | memoryview] = [_ABOUT.pack(coder.fingerprint, _FORMS.index(self._exact)), to_bytes(before)]
        for part in _pieces(ranges.coded):
            codes = coder.components(rows.device).encode(self.vectors(cache, rows, part, span))
            pieces += coder.packing.pack(codes.cpu().numpy())
        return framed(self._key, span, len(blocks), [*pieces, to_bytes(after), *map(to_bytes, draft)])

    def decode(self, cache: KVCache, blocks: Sequence[int], span: WireSpan, payload: bytes | memoryview) -> None:
        """See `WireCodec`."""
        check_span(cache, blocks, span)
        body = unframed(self._key, span, len(blocks), payload)
        coder, form = self._made_by(body)
        ranges, exact = _Ranges.of(coder.table, span), VectorBytes(form)
        slots, target = token_slots(cache, blocks, span.num_tokens), cache.layout.target
        parts = _pieces(ranges.coded)
        before, after = (exact.size(target, len(part)) for part in ranges.exact)
        sizes = [_ABOUT.size, before, *(coder.packing.size(len(part)) for part in parts), after]
        _, first, *coded, last, draft = _cut(body, sizes)
        require_length(draft, self._draft.size(draft, span.num_tokens, cache.layout))
        for part, data in zip(ranges.exact, (first, last), strict=True):
            exact.write(cache, target, slots[as_slice(part)], to_tensor(data, cache))
        for part, data in zip(parts, coded, strict=True):
            codes = torch.from_numpy(coder.packing.unpack(data, len(part))).to(slots.device)
            x = coder.components(slots.device).decode(codes)
            self._store(cache, slots[as_slice(part)], positions_of(span, part, slots.device), x)
        self._draft.write(cache, slots, draft)

    def sample(self, cache: KVCache, blocks: Sequence[int], span: WireSpan) -> Tensor | None:
        """Vectors [L, 2, T, C] of the block in the middle of the tokens that are not exact; None: there are none."""
        coded, size = _Ranges.of(self.table, span).coded, self._layout.block_size
        if not coded:
            return None
        block = (coded.start + coded.stop) // 2 // size
        tokens = range(max(coded.start, block * size), min(coded.stop, (block + 1) * size))
        return self.vectors(cache, block_rows(cache, blocks), tokens, span)

    def errors(self, vectors: Tensor) -> Errors:
        """What encoding and decoding does to vectors [L, 2, T, C]."""
        return self._coders[0].components(vectors.device).errors(vectors)

    def vectors(self, cache: KVCache, rows: Tensor, tokens: range, span: WireSpan) -> Tensor:
        """Keys before the rotary embedding, and values, [L, 2, T, C] float32 of tokens (counted from the span's first)."""
        x = read_vectors(cache, rows, tokens)
        self._rotation.undo(x[:, 0], positions_of(span, tokens, x.device))
        return x.flatten(3)

    def _store(self, cache: KVCache, slots: Tensor, positions: Tensor, x: Tensor) -> None:
        group = cache.layout.target
        keys, values = x.unflatten(3, (group.num_kv_heads, group.head_dim)).unbind(1)  # [L, T, G, D]
        self._rotation.apply(keys, positions)
        for layer in range(group.num_layers):
            cache.write(layer, slots, keys[layer], values[layer])

    def _made_by(self, body: memoryview) -> tuple[_Coder, str]:
        """The table and the form of exact tokens that a body names."""
        if len(body) < _ABOUT.size:
            raise WireError(f"KV rows that end early: {len(body)} bytes")
        fingerprint, form = _ABOUT.unpack_from(body)
        for coder in self._coders:
            if coder.fingerprint == fingerprint and form < len(_FORMS):
                return coder, _FORMS[form]
        known = ", ".join(coder.fingerprint.hex() for coder in self._coders)
        raise WireError(
            f"KV rows made with the table {fingerprint.hex()}, here are: {known}", hint="use the same table"
        )


def positions_of(span: WireSpan, tokens: range, device: torch.device) -> Tensor:
    """Absolute positions [T] of tokens that are counted from the span's first."""
    return torch.arange(tokens.start, tokens.stop, device=device) + span.first_token


def as_slice(part: range) -> slice:
    """A range of tokens as an index."""
    return slice(part.start, part.stop)


def _pieces(tokens: range) -> list[range]:
    """At most `_TOKENS_AT_ONCE` tokens each."""
    return [tokens[i : i + _TOKENS_AT_ONCE] for i in range(0, len(tokens), _TOKENS_AT_ONCE)]


def _cut(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Pieces of these sizes, and the rest."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(body[start : start + size])
        require_length(pieces[-1], size)
        start += size
    return [*pieces, body[start:]]
