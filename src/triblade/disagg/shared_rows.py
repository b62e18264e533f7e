"""Rows that a worker on the same host reads where they are: a pool of KV rows in memory that has a file descriptor.

The memory has no name, so nothing is left behind when its users die, however they die. Who reads rows of another process checks
them by their checksum and by the time until which they stand; see `wire.Rows`.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from triblade.errors import WireError
from triblade.kv.cache import KVCache


class SharedPool:
    """Memory for a pool of rows, [num_blocks, row_bytes] bytes of zeros that cost nothing until they are written.

    Attributes:
        file: its descriptor, to be sent to readers; it is closed when nobody holds this object any more.
        rows: the memory.
    """

    def __init__(self, num_blocks: int, row_bytes: int) -> None:
        self.file = os.memfd_create("triblade-kv", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, num_blocks * row_bytes)
        self.rows = mapped(self.file, num_blocks, row_bytes)


def mapped(file: int, num_blocks: int, row_bytes: int) -> Tensor:
    """The rows behind a descriptor, uint8 [num_blocks, row_bytes].

    Raises:
        WireError: there are fewer.
    """
    size = os.fstat(file).st_size
    if size < num_blocks * row_bytes:
        raise WireError(f"the peer's rows take {num_blocks * row_bytes} bytes, its memory has {size}")
    memory = mmap.mmap(file, num_blocks * row_bytes)  # torch knows no read-only memory
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, row_bytes)


def checksum(pool: Tensor, blocks: Sequence[int]) -> int:
    """CRC-32 of rows, one after the other."""
    found = 0
    rows = pool.numpy()
    for block in blocks:
        found = zlib.crc32(rows[block], found)
    return found


def take(cache: KVCache, blocks: Sequence[int], source: Tensor, theirs: Sequence[int]) -> int:
    """Copy rows `theirs` of a source into `blocks`; their checksum as they are here now."""
    cache.pool[list(blocks)] = source[list(theirs)]
    return checksum(cache.pool, blocks)


def still_stand(expires_s: float) -> bool:
    """Whether rows by reference may be relied on at this moment."""
    return time.monotonic() < expires_s
