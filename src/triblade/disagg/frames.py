"""Frames on a byte stream: a fixed prefix, a JSON header, a payload of bytes. Knows no message by name; a vocabulary does.

    prefix  [ magic | version | kind | header bytes | payload bytes | CRC-32 of what comes before and of the header ]

The payload carries a checksum of its own where it needs one. Lengths are bounded, so a peer that speaks something else costs no
memory. A frame that is cut short, damaged, of another version or not what its kind promises raises WireError, and the stream it
came from is of no more use. Loads no torch and no numpy.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from triblade.errors import WireError

MAX_HEADER_BYTES = 1 << 24
MAX_PAYLOAD_BYTES = 1 << 31
_PREFIX = struct.Struct("<4sHHIQI")
PREFIX_BYTES = _PREFIX.size
_UNCHECKED = struct.calcsize("<4sHHIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages: fields of JSON types, and a payload that may be empty."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)

    payload: bytes | memoryview = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a prefix announces."""

    kind: int
    header_bytes: int
    payload_bytes: int
    checksum: int
    raw: bytes  # what the checksum covers of it


class Vocabulary:
    """The messages of one protocol.

    Args:
        magic: four bytes that every frame begins with.
        version: both sides must have the same.
        kinds: number on the wire -> class.
    """

    def __init__(self, magic: bytes, version: int, kinds: Mapping[int, type[Message]]) -> None:
        self._magic, self._version = magic, version
        self._adapters = {number: TypeAdapter(kind) for number, kind in kinds.items()}
        self._numbers = {kind: number for number, kind in kinds.items()}

    def encode(self, message: Message) -> tuple[bytes, bytes | memoryview]:
        """Prefix with header, and the payload, to be sent one after the other."""
        values = {f.name: getattr(message, f.name) for f in fields(message) if f.name != "payload"}
        header = json.dumps(values, default=asdict, separators=(",", ":")).encode()
        number = self._numbers[type(message)]
        start = _PREFIX.pack(self._magic, self._version, number, len(header), len(message.payload), 0)[:_UNCHECKED]
        return start + struct.pack("<I", zlib.crc32(header, zlib.crc32(start))) + header, message.payload

    def prefix(self, data: bytes) -> Prefix:
        """Read the first `PREFIX_BYTES` of a frame.

        Raises:
            WireError: no peer of ours, of another version, or lengths beyond any message.
        """
        magic, version, kind, header_bytes, payload_bytes, checksum = _PREFIX.unpack(data)
        if magic != self._magic:
            raise WireError(f"the peer speaks something else: frame begins with {magic!r}", hint="check the address")
        if version != self._version:
            raise WireError(f"the peer speaks version {version}, this is {self._version}", hint="run equal versions")
        if kind not in self._adapters or header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise WireError(f"no such frame: kind {kind}, {header_bytes} and {payload_bytes} bytes")
        return Prefix(kind, header_bytes, payload_bytes, checksum, data[:_UNCHECKED])

    def decode(self, prefix: Prefix, header: bytes, payload: bytes | memoryview) -> Message:
        """The message of a whole frame.

        Raises:
            WireError: damaged, or fields that this kind does not have.
        """
        if zlib.crc32(header, zlib.crc32(prefix.raw)) != prefix.checksum:
            raise WireError("a frame's header is damaged")
        try:
            values: dict[str, Any] = json.loads(header)
            message: Message = self._adapters[prefix.kind].validate_python({**values, "payload": payload})
        except (ValueError, TypeError, ValidationError) as error:
            raise WireError(f"a frame of kind {prefix.kind} is malformed: {error}") from error
        return message
