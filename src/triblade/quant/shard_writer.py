"""Tensors into safetensors files as they come, so that no more than one of them need be in memory.

The length of a file's header is fixed when it is begun and padded with spaces when it is ended, which the format allows. Data
has no holes and every tensor begins at a multiple of its item size: a tensor whose bytes would put the next one elsewhere
waits for the end of the file. Knows no model. Nothing is complete before `close`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MAX_SHARD_BYTES = 5 * 10**9
HEADER_BYTES = 2**18  # room for about 2,000 tensors in a file; more go into the next one
_ALIGNMENT = 8
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardWriter:
    """Writes `model.safetensors`, or shards with an index, into a folder.

    Args:
        folder: an empty one.
        max_shard_bytes: of data in a file; a single larger tensor has a file of its own.
        header_bytes: room for the header of a file.
    """

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES, header_bytes: int = HEADER_BYTES) -> None:
        self._folder = folder
        self._max_shard_bytes = max_shard_bytes
        self._header_bytes = header_bytes
        self._shards: list[_Shard] = []
        self._shard_of: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors so far."""
        return sum(shard.num_bytes for shard in self._shards)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; its type, shape and bytes are kept as they are."""
        assert name not in self._shard_of, name
        if not self._shards or not self._shards[-1].has_room(name, tensor, self._max_shard_bytes):
            if self._shards:
                self._shards[-1].close()
            path = self._folder / f"shard-{len(self._shards) + 1}.writing"
            self._shards.append(_Shard(path, self._header_bytes))
        self._shards[-1].add(name, tensor)
        self._shard_of[name] = len(self._shards) - 1

    def close(self) -> None:
        """End the last file, give all their names, and write the index if there are several."""
        count = len(self._shards)
        if count:
            self._shards[-1].close()
        names = ["model.safetensors"] if count == 1 else [_shard_name(i, count) for i in range(count)]
        for shard, name in zip(self._shards, names, strict=True):
            shard.path.rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: names[shard] for tensor, shard in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            write_durably(self._folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode())

    def abandon(self) -> None:
        """Close what is open; the files are of no use."""
        for shard in self._shards:
            shard.abandon()


class _Shard:
    """One file: header length (u64), header (JSON), data."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self._file: BinaryIO = path.open("wb")
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_left = header_bytes - len(json.dumps(self._header))
        self._header_bytes = header_bytes
        self._waiting: list[tuple[str, Tensor]] = []
        self._written = 0
        self._file.seek(_ALIGNMENT + header_bytes)

    def has_room(self, name: str, tensor: Tensor, max_bytes: int) -> bool:
        return self.num_bytes + tensor.nbytes <= max_bytes and self._entry_bytes(name, tensor) <= self._header_left

    def add(self, name: str, tensor: Tensor) -> None:
        self.num_bytes += tensor.nbytes
        self._header_left -= self._entry_bytes(name, tensor)
        if tensor.nbytes % _ALIGNMENT:
            self._waiting.append((name, tensor))
        else:
            self._write(name, tensor)

    def close(self) -> None:
        """From the largest items to the smallest, each begins where it may."""
        for name, tensor in sorted(self._waiting, key=lambda item: -item[1].dtype.itemsize):
            self._write(name, tensor)
        self._waiting.clear()
        header = json.dumps(self._header).encode().ljust(self._header_bytes)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(_ALIGNMENT, "little") + header)
        flush_to_disk(self._file)
        self._file.close()

    def abandon(self) -> None:
        self._waiting.clear()
        try:
            self._file.close()
        except OSError:  # a full disk, which has been told
            return

    def _write(self, name: str, tensor: Tensor) -> None:
        begin, self._written = self._written, self._written + tensor.nbytes
        self._header[name] = {**_described(tensor), "data_offsets": [begin, self._written]}
        self._file.write(as_bytes(tensor))

    def _entry_bytes(self, name: str, tensor: Tensor) -> int:
        """At most what the header's JSON grows by; offsets have at most 13 digits."""
        return len(json.dumps({name: {**_described(tensor), "data_offsets": [10**13] * 2}}))


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and its folder; it is on the disk when this returns."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        flush_to_disk(file)


def flush_to_disk(file: BinaryIO) -> None:
    """Wait until what was written is on the disk, and let it be read from there again."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape)}


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
