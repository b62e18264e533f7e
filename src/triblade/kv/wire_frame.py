"""The frame around KV rows on the wire: which codec, which tokens of which model, how long, and a checksum over all of it.

    header  [ magic | version | codec | first token, tokens, prompt tokens, blocks | identity | body bytes | CRC-32 ]
    body    what the codec makes of the rows

Knows no tensor and no codec. A frame that is cut short, damaged, of another codec, another model or other tokens raises before
anything is read from its body.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triblade.errors import WireError

MAGIC = b"TBKV"
VERSION = 1
_HEADER = struct.Struct("<4sB3x16s4I8sQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_RESEND = "have the rows sent again, or compute them"


@dataclass(frozen=True, slots=True)
class WireSpan:
    """Which tokens of a prompt the blocks of one payload hold; blocks begin with `first_token`, the last may be partly filled."""

    first_token: int
    num_tokens: int
    num_prompt_tokens: int  # of the whole prompt: decides which tokens stay exact

    @property
    def positions(self) -> range:
        """Absolute positions of the tokens."""
        return range(self.first_token, self.first_token + self.num_tokens)


@dataclass(frozen=True, slots=True)
class FrameKey:
    """What sender and receiver must agree on before a body means anything."""

    codec: str
    identity: str  # hexadecimal: a layout's fingerprint, or that of its content


def framed(key: FrameKey, span: WireSpan, num_blocks: int, body: Sequence[bytes | memoryview]) -> bytes:
    """One payload out of the pieces of its body."""
    size = sum(len(piece) for piece in body)
    header = _header(key, span, num_blocks, size)
    checksum = zlib.crc32(header)
    for piece in body:
        checksum = zlib.crc32(piece, checksum)
    return b"".join((header, _CHECKSUM.pack(checksum), *body))


def unframed(key: FrameKey, span: WireSpan, num_blocks: int, payload: bytes | memoryview) -> memoryview:
    """The body of a payload that is whole, and is what the receiver waits for.

    Raises:
        WireError: it is not; the message names what differs.
    """
    view = memoryview(payload).cast("B")
    found = _parsed(view)
    wanted = _HEADER.unpack(_header(key, span, num_blocks, len(view) - HEADER_BYTES))
    for i, name in enumerate(_NAMES):
        if wanted[i] != found[i]:
            raise WireError(
                f"KV rows with another {name}: {_shown(found[i])}, expected {_shown(wanted[i])}", hint=_RESEND
            )
    body = view[HEADER_BYTES:]
    checksum = zlib.crc32(body, zlib.crc32(view[: _HEADER.size]))
    if checksum != _CHECKSUM.unpack_from(view, _HEADER.size)[0]:
        raise WireError(f"KV rows of tokens {span.positions} are damaged: checksum {checksum:08x}", hint=_RESEND)
    return body


def codec_of(payload: bytes | memoryview) -> str:
    """Name of the codec that made a payload: a sender may fall back to another one for some requests.

    Raises:
        WireError: this is no payload.
    """
    name: bytes = _parsed(memoryview(payload).cast("B"))[2]
    return name.rstrip(b"\0").decode("ascii", "replace")


_NAMES = (
    *("beginning", "version", "codec", "first token", "number of tokens", "prompt length", "number of blocks"),
    *("model or layout", "length"),
)


def _header(key: FrameKey, span: WireSpan, num_blocks: int, body_bytes: int) -> bytes:
    numbers = (span.first_token, span.num_tokens, span.num_prompt_tokens, num_blocks)
    identity = bytes.fromhex(key.identity)[:8]
    return _HEADER.pack(MAGIC, VERSION, key.codec.encode("ascii"), *numbers, identity, body_bytes)


def _parsed(view: memoryview) -> tuple[Any, ...]:
    if len(view) < HEADER_BYTES or bytes(view[:4]) != MAGIC:
        raise WireError(f"{len(view)} bytes that are no KV rows: they begin with {bytes(view[:4])!r}", hint=_RESEND)
    return _HEADER.unpack_from(view)


def _shown(value: bytes | int) -> str:
    if isinstance(value, int):
        return str(value)
    text = value.rstrip(b"\0")
    return text.decode() if text.isascii() and text.decode().isprintable() else value.hex()
