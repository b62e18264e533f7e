"""KV rows from a pool into another one, perhaps of another device, as launches; and the sum that tells whether they are there.

A pool is an address and a row's bytes here: it need not be this process's. Knows no request and no transport.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triblade.ops.cuda.device import Device

THREADS, UNROLL, UNIT_BYTES = 512, 4, 16
WARPS = THREADS // 32
VECTORS = 16  # that a warp quantizes at a time
# Processors that rows on their way take from whoever computes there: about what a link of NVLink's fourth generation needs.
COPY_BLOCKS = 32
QUANTIZE_BLOCKS = 96


class Place(ctypes.Structure):
    """Where vectors lie in rows; see `kernels/quantize_rows.cu`."""

    _fields_ = (
        ("row_bytes", ctypes.c_uint64),
        ("layer_bytes", ctypes.c_uint64),
        ("keys", ctypes.c_int),
        ("values", ctypes.c_int),
        ("key_scales", ctypes.c_int),
        ("value_scales", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """From rows of 16-bit numbers to rows of int8."""

    source: Place
    target: Place
    num_layers: int
    num_vectors: int  # of a plane: tokens of a block times heads
    head_dim: int
    is_float16: bool

    @property
    def constants(self) -> dict[str, int]:
        """What is compiled in."""
        return {"FLOAT16": int(self.is_float16), "DIM": self.head_dim}


class RowKernels:
    """Copies rows of one pool, for one thread, which waits for a launch before the next one.

    Args:
        device: runs kernels.
        pool: uint8 [num_blocks, row_bytes], rows of whole units of 16 bytes.
    """

    def __init__(self, device: Device, pool: Tensor) -> None:
        self._device, self._pool = device, pool
        self._copy = device.kernel("copy_rows.cu", "copy_rows", {})
        self._is_cuda = pool.device.type == "cuda"
        # Kernels write their sums where the host reads them.
        size = max(COPY_BLOCKS, QUANTIZE_BLOCKS) * WARPS
        self._sums = torch.zeros(size, dtype=torch.int64, pin_memory=self._is_cuda)
        # Numbers of blocks, and where copies of them need no waiting.
        self._numbers = torch.zeros(0, dtype=torch.int32)
        self._table = torch.zeros(0, dtype=torch.int32, device=pool.device)

    def copy(self, blocks: Sequence[int], target: int | None, theirs: Sequence[int]) -> None:
        """Queue: rows `blocks` become rows `theirs` of the pool at address `target`; None only sums them up."""
        units = self._pool.shape[1] // UNIT_BYTES
        pieces = len(blocks) * -(-units // (THREADS * UNROLL))
        arguments = [*self._ends(blocks, theirs, target), ctypes.c_int(len(blocks)), ctypes.c_uint32(units)]
        self._launch(self._copy, min(COPY_BLOCKS, pieces), arguments)

    def quantize(self, blocks: Sequence[int], target: int, theirs: Sequence[int], quantization: Quantization) -> None:
        """Queue: the same into rows of int8."""
        kernel = self._device.kernel("quantize_rows.cu", "quantize_rows", quantization.constants)
        q = quantization
        sizes = (q.source, q.target, ctypes.c_int(q.num_layers), ctypes.c_int(q.num_vectors))
        arguments = [*self._ends(blocks, theirs, target), ctypes.c_int(len(blocks)), *sizes]
        items = len(blocks) * q.num_layers * 2 * -(-q.num_vectors // VECTORS)
        self._launch(kernel, min(QUANTIZE_BLOCKS, -(-items // WARPS)), arguments)

    def total(self) -> int:
        """The sum of the rows of the last launch, once it is done; see `kernels/row_sums.cuh`."""
        return int(self._sums.numpy().view(np.uint64).sum())  # which goes round at 2^64

    def _ends(self, blocks: Sequence[int], theirs: Sequence[int], target: int | None) -> list[ctypes.c_void_p]:
        """Both pools and the numbers of the blocks. The last launch is done, or its numbers would not be free."""
        count = len(blocks) + len(theirs)
        if count > len(self._numbers):
            self._numbers = torch.zeros(2 * count, dtype=torch.int32, pin_memory=self._is_cuda)
            self._table = torch.zeros(2 * count, dtype=torch.int32, device=self._pool.device)
        self._numbers.numpy()[:count] = (*blocks, *theirs)
        self._table[:count].copy_(self._numbers[:count], non_blocking=True)
        return [ctypes.c_void_p(at) for at in (self._pool.data_ptr(), target or 0, self._table.data_ptr())]

    def _launch(self, kernel: object, blocks: int, arguments: Sequence[object]) -> None:
        self._sums.zero_()
        sums = ctypes.c_void_p(self._sums.data_ptr())
        self._device.launch(kernel, (blocks, 1, 1), THREADS, [*arguments, sums], overlaps=False)
