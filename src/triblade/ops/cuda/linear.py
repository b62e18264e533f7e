"""Matrix products with packed weights: few tokens by the streaming kernel, many by spelling the weights out for the library.

`tiling` is the one place that says how a product is cut. Results do not depend on timing: sums over warps and blocks are taken in
a fixed order. Knows no model. Invariant: a scratch buffer is used by one product at a time, in stream order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.ops.backend import Activation
from triblade.ops.cuda.device import Device, pointer
from triblade.ops.cuda.packing import CHUNK, DENSE_BITS, TILE_ROWS, DeviceMatrix
from triblade.ops.reference import ReferenceBackend

TOKEN_TILE = 8  # the narrow side of the matrix instruction
MOST_TOKENS = 64  # of one launch of the streaming kernel
STREAMED_TOKENS = 128  # at most; beyond, spelling the weights out once costs less than reading them again
WARP_ROOM = 132 * 32  # warps that a large device holds with the registers this kernel takes
MOST_SPLITS = 8
SHARED_BYTES = 48 * 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut; see `kernels/linear.cu`."""

    row_tiles: int  # per warp
    token_tiles: int
    warps_along_rows: int
    warps_along_inputs: int
    depth: int  # chunks in flight per warp
    blocks: int  # that should fit a multiprocessor, which bounds registers
    splits: int  # blocks along inputs

    @property
    def threads(self) -> int:
        return 32 * self.warps_along_rows * self.warps_along_inputs

    @property
    def block_tiles(self) -> int:
        return self.row_tiles * self.warps_along_rows


def tiling(matrix: DeviceMatrix, tokens: int) -> Tiling:
    """How to multiply `tokens` (1 to 64) rows with a matrix."""
    tiles, token_tiles = -(-matrix.rows // TILE_ROWS), _power_of_two(-(-tokens // TOKEN_TILE))
    units = matrix.inputs // max(CHUNK, matrix.group)  # what the inputs can be cut into
    if token_tiles <= 2:
        # Warps of a block share rows and cut the inputs, as many as fill the device once.
        row_tiles = 2 if tiles * 4 > WARP_ROOM else 1
        warps = _at_most(WARP_ROOM // (tiles // row_tiles + 1), min(16, units))
        depth = 2 if row_tiles == 2 else 4
        return Tiling(row_tiles, token_tiles, 1, max(1, warps), depth, _blocks(32 * max(1, warps), 64), 1)
    # Many tokens: warps along rows share the tokens in the first cache, and blocks cut the inputs.
    row_tiles = 2 if tiles >= 8 else 1
    along_rows = 4 if tiles >= 4 * row_tiles else 1
    along_inputs = 2 if units >= 2 else 1
    row_blocks = -(-tiles // (row_tiles * along_rows))
    splits = max(1, min(MOST_SPLITS, units // along_inputs, 264 // row_blocks))
    return Tiling(row_tiles, token_tiles, along_rows, along_inputs, 2, 1, splits)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _at_most(number: int, most: int) -> int:
    """The largest power of two up to `number` and `most`; at least 1."""
    bound = max(1, min(number, most))
    return 1 << (bound.bit_length() - 1)


def _blocks(threads: int, registers: int) -> int:
    return max(1, min(16, 65536 // (threads * registers)))


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("inputs", ctypes.c_int),
    )


class _Output(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("is_float32", ctypes.c_int),
    )


class LinearKernels:
    """Products on one device.

    Args:
        device: where kernels run.
        dtype: of activations: bfloat16 or float16.
        memory: where scratch lies.
    """

    def __init__(self, device: Device, dtype: torch.dtype, memory: torch.device) -> None:
        self._device = device
        self._dtype = dtype
        self._memory = memory
        self._partial = torch.empty(0, device=memory)
        self._counters = torch.zeros(4096, dtype=torch.int32, device=memory)
        self._dense = torch.empty(0, dtype=dtype, device=memory)
        self._reference = ReferenceBackend()

    def reserve(self, matrices: list[DeviceMatrix]) -> None:
        """Scratch for products with these, made once, since recorded steps keep its address."""
        partial, dense = 0, 0
        for matrix in matrices:
            for tokens in (24, MOST_TOKENS):
                cut = tiling(matrix, tokens)
                tiles = -(-matrix.rows // TILE_ROWS)
                partial = max(partial, cut.splits * tiles * cut.token_tiles * 32 * 4 if cut.splits > 1 else 0)
            dense = max(dense, matrix.rows * matrix.inputs if matrix.bits != DENSE_BITS else 0)
        self._partial = torch.empty(partial, dtype=torch.float32, device=self._memory)
        self._dense = torch.empty(dense, dtype=self._dtype, device=self._memory)

    def multiply(
        self, x: Tensor, matrix: DeviceMatrix, out: Tensor, residual: Tensor | None = None, activation: Activation = "silu"
    ) -> None:
        """out [T, N] = x [T, in] W^T + b (+ residual [T, N], which may be `out`); gated: out [T, N / 2] = act(gate) * up.

        `out` is of the activations' type or, without residual, float32.
        """
        if x.shape[0] > STREAMED_TOKENS:
            self._multiply_many(x, matrix, out, residual, activation)
            return
        for start in range(0, x.shape[0], MOST_TOKENS):
            part = slice(start, start + MOST_TOKENS)
            beside = None if residual is None else residual[part]
            self._stream(x[part], matrix, out[part], beside, activation)

    def stream_with(
        self, cut: Tiling, x: Tensor, matrix: DeviceMatrix, out: Tensor, residual: Tensor | None = None,
        activation: Activation = "silu",
    ) -> None:  # fmt: skip
        """`multiply` with a given tiling, for up to 64 tokens."""
        kernel = self._device.kernel("linear.cu", "linear", self.constants(matrix, cut, activation))
        tiles = -(-matrix.rows // TILE_ROWS)
        arguments = (
            _Matrix(
                matrix.codes.data_ptr(),
                pointer(matrix.scales).value,
                pointer(matrix.offsets).value,
                pointer(matrix.tile_bias).value,
                matrix.rows,
                matrix.inputs,
            ),
            pointer(x),
            _Output(out.data_ptr(), pointer(residual).value, out.shape[1], out.dtype == torch.float32),
            pointer(self._partial),
            pointer(self._counters),
            ctypes.c_int(x.shape[0]),
        )
        self._device.launch(kernel, (-(-tiles // cut.block_tiles), cut.splits, 1), cut.threads, arguments)

    def dequantize(self, matrix: DeviceMatrix) -> Tensor:
        """The matrix [N, in] in the activations' type; in the scratch buffer, so good until the next call."""
        if matrix.bits == DENSE_BITS:
            return matrix.codes
        out = self._dense[: matrix.rows * matrix.inputs].view(matrix.rows, matrix.inputs)
        kernel = self._device.kernel("vectors.cu", "dequantize", {"FLOAT16": int(self._dtype == torch.float16)})
        numbers = (matrix.rows, matrix.inputs, matrix.group, matrix.bits, int(matrix.is_gated))
        arguments = [pointer(t) for t in (matrix.codes, matrix.scales, matrix.offsets, out)]
        warps = 4
        grid = (-(-matrix.inputs // CHUNK // warps), -(-matrix.rows // TILE_ROWS), 1)
        self._device.launch(kernel, grid, 32 * warps, [*arguments, *map(ctypes.c_int, numbers)])
        return out

    def _stream(
        self, x: Tensor, matrix: DeviceMatrix, out: Tensor, residual: Tensor | None, activation: Activation
    ) -> None:
        self.stream_with(tiling(matrix, x.shape[0]), x, matrix, out, residual, activation)

    def _multiply_many(
        self, x: Tensor, matrix: DeviceMatrix, out: Tensor, residual: Tensor | None, activation: Activation
    ) -> None:
        product = F.linear(x, self.dequantize(matrix), matrix.bias)
        if matrix.is_gated:
            self.gate(product, out, activation)
        elif residual is not None:
            torch.add(product, residual, out=out)
        else:
            out.copy_(product)

    def gate(self, gate_up: Tensor, out: Tensor, activation: Activation) -> None:
        """out [T, I] = act(gate) * up of the halves of [T, 2 I]."""
        tokens, width = out.shape
        if width % 8:
            out.copy_(self._reference.gated_activation(gate_up, activation))
            return
        kernel = self._device.kernel("vectors.cu", "gated_activation", {"FLOAT16": int(self._dtype == torch.float16)})
        parts = -(-width // (8 * 256))
        arguments = (pointer(gate_up), pointer(out), ctypes.c_int(width), ctypes.c_int(activation == "gelu_tanh"))
        self._device.launch(kernel, (parts, tokens, 1), 256, arguments)

    def constants(self, matrix: DeviceMatrix, cut: Tiling, activation: Activation) -> dict[str, int]:
        """What is compiled into `kernels/linear.cu` for such a product."""
        return {
            "FLOAT16": int(self._dtype == torch.float16),
            "BITS": matrix.bits,
            "GROUP": matrix.group or CHUNK,
            "OFFSETS": int(matrix.offsets is not None),
            "GATED": int(matrix.is_gated),
            "GELU": int(activation == "gelu_tanh"),
            "ROWS": cut.row_tiles,
            "NT": cut.token_tiles,
            "WM": cut.warps_along_rows,
            "WK": cut.warps_along_inputs,
            "DEPTH": cut.depth,
            "BLOCKS": cut.blocks,
        }
