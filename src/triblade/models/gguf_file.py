"""Reads the header of a GGUF file and maps its data, trusting nothing.

Every count, length, dimension and offset is checked against the file's size with Python integers before anything is
read or allocated, so a hostile or truncated file is a CheckpointError and never a crash. Knows no model and no
tokenizer. Layout: magic, version, counts; key-value pairs; tensor records; then, aligned, the tensors' data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from triblade.errors import CheckpointError, UnsupportedError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1  # key length, key, value type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, number of dimensions, one dimension, type, offset
_SCALARS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]  # outermost first, as torch writes it; the file stores the reverse
    type: GGMLQuantizationType
    offset: int  # from the beginning of the file
    num_bytes: int


class GGUFFile:
    """A validated GGUF file.

    Attributes:
        metadata: key -> str, int, float, bool, or a list of these.
        tensors: name -> where it lies.
        data_start: number of bytes of the header, alignment included.

    Raises:
        CheckpointError: from the constructor, when the file is corrupt or cut short.
        UnsupportedError: its version or byte order is not read.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data_start: int

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"cannot read {path}: {error}") from error
        reader = _Reader(self._map, path)
        tensor_count, pair_count = reader.preamble()
        self.metadata = _read_pairs(reader, pair_count)
        self.data_start, self.tensors = _read_tensors(reader, tensor_count, _alignment(self.metadata, reader))

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return len(self._map)

    def release(self) -> None:
        """Let go of the pages that were read; reading again brings them back."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def forget_metadata(self) -> None:
        """Let go of the metadata, of which a vocabulary is tens of thousands of strings."""
        self.metadata = {}

    def bytes_at(self, offset: int, count: int) -> bytes:
        """A copy of `count` bytes."""
        return self._map[offset : offset + count]

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, mapped and read-only.

        Returns:
            [*shape[:-1], bytes per row]: rows of whole quantization blocks, or of plain elements.
        """
        tensor = self.tensors[name]
        flat = np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.reshape(*tensor.shape[:-1], -1)


class _Reader:
    """A cursor over the header that never passes the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def corrupt(self, what: str) -> CheckpointError:
        hint = "the file is damaged or cut short; fetch it again"
        return CheckpointError(f"corrupt GGUF header in {self.path}: {what}", hint=hint)

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def skip(self, count: int) -> int:
        """Move past `count` bytes and return where they begin."""
        if count > self.remaining:
            raise self.corrupt(f"{count} bytes needed at byte {self.position}, {self.remaining} left")
        begin, self.position = self.position, self.position + count
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length: int = self.number("Q")
        begin = self.skip(length)
        try:
            return self.data[begin : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"text at byte {begin} is not UTF-8: {error.reason}") from error

    def preamble(self) -> tuple[int, int]:
        """Check magic and version; the numbers of tensors and of key-value pairs."""
        if len(self.data) < 24 or self.data[:4] != _MAGIC:
            raise CheckpointError(f"not a GGUF file: {self.path}: it begins with {self.data[:4]!r}")
        self.skip(4)
        version: int = self.number("I")
        if version not in _VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise UnsupportedError(f"GGUF file is {kind}: {self.path}", hint="little-endian versions 2 and 3 are read")
        return self.number("Q"), self.number("Q")

    def value(self) -> Any:
        kind = self.value_type()
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is GGUFValueType.ARRAY:
            return self.array()
        value = self.numbers(kind, 1)[0]
        # The shortest number that is that float32: 1e-05 and not 9.999999747378752e-06, as configurations write it.
        return float(str(np.float32(value))) if kind is GGUFValueType.FLOAT32 else value

    def value_type(self) -> GGUFValueType:
        code: int = self.number("I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self.corrupt(f"unknown value type {code} at byte {self.position - 4}") from None

    def array(self) -> list[Any]:
        kind = self.value_type()
        length: int = self.number("Q")
        if kind is GGUFValueType.STRING:
            self.require_room(length, 8, "strings")
            return [self.text() for _ in range(length)]
        if kind is GGUFValueType.ARRAY:
            raise self.corrupt("an array of arrays")
        return self.numbers(kind, length)

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        begin = self.skip(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.data, dtype=dtype, count=count, offset=begin).tolist()
        return values

    def require_room(self, count: int, each: int, what: str) -> None:
        if count * each > self.remaining:
            raise self.corrupt(f"{count} {what} cannot fit in the {self.remaining} bytes left")


def _read_pairs(reader: _Reader, count: int) -> dict[str, Any]:
    reader.require_room(count, _MIN_PAIR_BYTES, "key-value pairs")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        begin = reader.position
        key = reader.text()
        if not key or key in metadata:
            raise reader.corrupt(f"empty key at byte {begin}" if not key else f"key given twice: {key!r}")
        metadata[key] = reader.value()
    return metadata


def _alignment(metadata: Mapping[str, Any], reader: _Reader) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 30:
        raise reader.corrupt(f"general.alignment must be a power of two, got: {alignment!r:.80}")
    return alignment


def _read_tensors(reader: _Reader, count: int, alignment: int) -> tuple[int, dict[str, GGUFTensor]]:
    """The beginning of the data, and every tensor with its checked place."""
    reader.require_room(count, _MIN_TENSOR_BYTES, "tensors")
    records = [_read_record(reader) for _ in range(count)]
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, dimensions, kind, offset in records:
        if name in tensors:
            raise reader.corrupt(f"tensor given twice: {name!r}")
        num_bytes = _num_bytes(reader, name, dimensions, kind)
        if offset % alignment:
            raise reader.corrupt(f"tensor {name!r} is not aligned to {alignment} bytes: offset {offset}")
        if data_start + offset + num_bytes > len(reader.data):
            raise CheckpointError(
                f"tensor larger than file: {name!r} needs bytes up to {data_start + offset + num_bytes}, "
                f"{reader.path} has {len(reader.data)}",
                hint="the file is cut short; fetch it again",
            )
        tensors[name] = GGUFTensor(name, tuple(reversed(dimensions)), kind, data_start + offset, num_bytes)
    _check_disjoint(reader, tensors.values())
    return data_start, tensors


def _read_record(reader: _Reader) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = reader.text()
    rank: int = reader.number("I")
    if not name or not 1 <= rank <= _MAX_DIMENSIONS:
        raise reader.corrupt(f"tensor {name!r} has {rank} dimensions, 1 to {_MAX_DIMENSIONS} are possible")
    dimensions = tuple(int(reader.number("Q")) for _ in range(rank))
    if 0 in dimensions:
        raise reader.corrupt(f"tensor {name!r} has a dimension of 0: {dimensions}")
    code: int = reader.number("I")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise UnsupportedError(f"tensor {name!r} in {reader.path} has an unknown type: {code}") from None
    return name, dimensions, kind, int(reader.number("Q"))


def _num_bytes(reader: _Reader, name: str, dimensions: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if dimensions[0] % block_elements:
        row = f"rows of {dimensions[0]} elements"
        raise reader.corrupt(f"tensor {name!r}: {row} are no whole {kind.name} blocks of {block_elements}")
    return prod(dimensions) // block_elements * block_bytes


def _check_disjoint(reader: _Reader, tensors: Iterable[GGUFTensor]) -> None:
    end, previous = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset < end:
            raise reader.corrupt(f"tensors {previous!r} and {tensor.name!r} overlap")
        end, previous = tensor.offset + tensor.num_bytes, tensor.name
