"""Codes of a few bits each, packed without holes: bit by bit, tokens side by side in a byte.

    codes [R, T], row r of b[r] bits  ->  one run of T bits (padded to whole bytes) per bit of a row, rows of equal b together

So the size is sum(b) * ceil(T / 8) bytes exactly, and whole arrays are packed at once. Knows no table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows by how many bits they have."""

    rows: tuple[tuple[int, npt.NDArray[np.intp]], ...]  # bits, rows of so many
    num_rows: int

    @classmethod
    def of(cls, bits: Codes) -> Packing:
        """For rows of `bits` [R], 1 to 8 each."""
        return cls(tuple((int(count), np.flatnonzero(bits == count)) for count in np.unique(bits)), len(bits))

    def size(self, num_tokens: int) -> int:
        """Bytes of packed codes."""
        return sum(bits * len(rows) for bits, rows in self.rows) * -(-num_tokens // 8)

    def pack(self, codes: Codes) -> list[memoryview]:
        """Codes [R, T] as pieces of bytes."""
        pieces = []
        for bits, rows in self.rows:
            own = codes[rows]
            pieces += [np.packbits((own >> bit) & 1, axis=1).reshape(-1).data for bit in range(bits)]
        return pieces

    def unpack(self, data: memoryview, num_tokens: int) -> Codes:
        """The codes [R, T] in exactly `size(T)` bytes."""
        stream, start, width = np.frombuffer(data, dtype=np.uint8), 0, -(-num_tokens // 8)
        codes = np.empty((self.num_rows, num_tokens), dtype=np.uint8)
        for bits, rows in self.rows:
            own = np.zeros((len(rows), num_tokens), dtype=np.uint8)
            for bit in range(bits):
                end = start + len(rows) * width
                plane = np.unpackbits(stream[start:end].reshape(len(rows), width), axis=1, count=num_tokens)
                own |= plane << bit
                start = end
            codes[rows] = own
        return codes
