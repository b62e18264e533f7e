"""Matrix products with packed weights: few tokens by the streaming kernel, many by spelling the weights out for the library.

`tiling` is the one place that says how a product is cut. Results do not depend on timing: sums over warps and blocks are taken in
a fixed order. Knows no model. Invariant: a scratch buffer is used by one product at a time, in stream order.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.ops.backend import Activation
from triblade.ops.cuda.device import Device, pointer
from triblade.ops.cuda.packing import CHUNK, DENSE_BITS, TILE_ROWS, DeviceMatrix

TOKEN_TILE = 8  # the narrow side of the matrix instruction
MOST_TOKENS = 64  # of one launch of the streaming kernel
# Up to so many tokens weights are streamed. Beyond, spelling packed weights out once costs less than reading them again, and for
# dense ones the library is as fast.
STREAMED_TOKENS = 128
STREAMED_TOKENS_DENSE = 16
SHARED_BYTES = 48 * 1024
MOST_SETS = 16384  # of rows that share a counter


@dataclass(frozen=True, slots=True)
class Activations:
    """Inputs of products. With token tiles, `values` are in the order of `kernels/layout.cuh`, padded to whole slabs."""

    values: Tensor  # [tokens or more, width]
    tokens: int
    tiles: int

    @classmethod
    def empty(cls, tokens: int, width: int, tiles: int, dtype: torch.dtype, memory: torch.device) -> Activations:
        """Room for `tokens`."""
        slab = max(1, TOKEN_TILE * tiles)
        return cls(torch.zeros(-(-tokens // slab) * slab, width, dtype=dtype, device=memory), tokens, tiles)

    def first(self, tokens: int, tiles: int) -> Activations:
        """The same memory for fewer tokens."""
        return Activations(self.values, tokens, tiles)

    def slab(self, number: int) -> int:
        """Address of the inputs of tokens [64 number, 64 (number + 1))."""
        return self.values.data_ptr() + number * MOST_TOKENS * self.values.shape[1] * self.values.element_size()


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


@cache
def _measured(capability: int) -> Mapping[str, tuple[int, ...]]:
    """Tilings that were the fastest of many on such a device, by `_key`; see `benchmarks/gpu_kernels.py`."""
    file = resources.files("triblade.ops.cuda") / f"tilings_sm{capability}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def key_of(matrix: DeviceMatrix, columns: int) -> str:
    """What a measured tiling is for: the matrix and tiles of 8 tokens."""
    return f"{matrix.bits} bits g{matrix.group} {matrix.rows}x{matrix.inputs} {'gated ' if matrix.is_gated else ''}t{columns}"


def tiling(matrix: DeviceMatrix, columns: int, capability: int = 90) -> Tiling:
    """How to multiply 8 `columns` (1, 2, 4 or 8) tokens with a matrix: as measured for its size, else a rule made from that."""
    measured = _measured(capability).get(key_of(matrix, columns))
    if measured is not None:
        return Tiling(*measured)
    tiles = -(-matrix.rows // TILE_ROWS)
    units = matrix.inputs // max(CHUNK, matrix.group)  # what the inputs can be cut into
    if columns <= 2:
        warps = _at_most(min(4 if tiles >= 1024 else 8 if tiles >= 256 else 16, units))
        return Tiling(1, columns, 1, warps, 2, max(1, 24 // warps), 1)
    along_rows = 2 if tiles >= 512 else 1
    warps = _at_most(min(4 // along_rows, units))
    row_tiles = 2 if tiles >= 1024 else 1
    splits = _at_most(min(2, units // warps)) if tiles < 512 else 1
    return Tiling(row_tiles, columns, along_rows, warps, 2, 1, splits)


def _at_most(number: int) -> int:
    """The largest power of two up to a number; at least 1."""
    return 1 << (max(1, number).bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Product:
    """What `LinearKernels.multiply` is asked for."""

    x: Activations
    matrix: DeviceMatrix
    out: Tensor | Activations
    residual: Tensor | None = None
    activation: Activation = "silu"


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
        ("token_tiles", ctypes.c_int),
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
        self.streamed_tokens = STREAMED_TOKENS
        self._counters = torch.zeros(MOST_SETS, dtype=torch.int32, device=memory)
        self._dense = torch.empty(0, dtype=dtype, device=memory)

    def reserve(self, matrices: list[DeviceMatrix]) -> None:
        """Scratch for products with these, made once, since recorded steps keep its address."""
        partial, dense = 0, 0
        if all(matrix.bits == DENSE_BITS for matrix in matrices):
            self.streamed_tokens = STREAMED_TOKENS_DENSE
        for matrix in matrices:
            partial = max(partial, *(partial_numbers(matrix, tiling(matrix, columns)) for columns in (1, 2, 4, 8)))
            dense = max(dense, matrix.rows * matrix.inputs if matrix.bits != DENSE_BITS else 0)
        self._partial = torch.empty(partial, dtype=torch.float32, device=self._memory)
        self._dense = torch.empty(dense, dtype=self._dtype, device=self._memory)

    def tiles(self, tokens: int) -> int:
        """How many tokens' inputs lie together (in tiles of 8) for products of so many: 1, 2, 4 or 8; 0: row after row."""
        if tokens > self.streamed_tokens:
            return 0
        return 1 << (-(-min(tokens, MOST_TOKENS) // TOKEN_TILE) - 1).bit_length()

    def inputs(self, tokens: int, width: int) -> Activations:
        """Room for the inputs of a product."""
        return Activations.empty(tokens, width, self.tiles(tokens), self._dtype, self._memory)

    def multiply(
        self,
        x: Activations,
        matrix: DeviceMatrix,
        out: Tensor | Activations,
        residual: Tensor | None = None,
        activation: Activation = "silu",
    ) -> None:
        """out [T, N] = x [T, in] W^T + b (+ residual [T, N], which may be `out`); gated: out [T, N / 2] = act(gate) * up.

        `out` is of the activations' type or, without residual, float32.
        """
        if x.tiles == 0:
            values = out.values if isinstance(out, Activations) else out
            self._multiply_many(x.values[: x.tokens], matrix, values[: x.tokens], residual, activation)
            return
        cut = tiling(matrix, x.tiles)
        for slab in range(-(-x.tokens // MOST_TOKENS)):
            self.stream(Product(x, matrix, out, residual, activation), cut, slab)

    def stream(self, product: Product, cut: Tiling, slab: int = 0) -> None:
        """`multiply` with a given tiling, for one slab of up to 64 tokens."""
        x, matrix, out, residual = product.x, product.matrix, product.out, product.residual
        kernel = self._device.kernel("linear.cu", "linear", self.constants(matrix, cut, product.activation))
        sets = -(-matrix.rows // (TILE_ROWS * cut.block_tiles))
        part = slice(slab * MOST_TOKENS, min(x.tokens, (slab + 1) * MOST_TOKENS))
        if isinstance(out, Activations):
            output = _Output(out.slab(slab), None, out.values.shape[1], 0, out.tiles)
        else:
            beside = None if residual is None else residual[part].data_ptr()
            output = _Output(out[part].data_ptr(), beside, out.shape[1], out.dtype == torch.float32, 0)
        parts = (pointer(t).value for t in (matrix.codes, matrix.scales, matrix.offsets, matrix.tile_bias))
        arguments = (
            _Matrix(*parts, matrix.rows, matrix.inputs),
            ctypes.c_void_p(x.slab(slab)),
            output,
            pointer(self._partial),
            pointer(self._counters),
            ctypes.c_int(part.stop - part.start),
        )
        self._device.launch(kernel, (sets, cut.splits, 1), cut.threads, arguments)

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


def partial_numbers(matrix: DeviceMatrix, cut: Tiling) -> int:
    """Scratch that a product cut so needs, in numbers."""
    tiles = -(-matrix.rows // TILE_ROWS)
    return cut.splits * tiles * cut.token_tiles * 32 * 4 if cut.splits > 1 else 0
