"""Matrix products with packed weights: few tokens by the streaming kernels, many by spelling the weights out for the library.

`layout` says by how many tokens which kernel multiplies, `tilings` how it cuts. Results do not depend on timing: sums over
warps and blocks are taken in a fixed order. Knows no model. Invariant: a scratch buffer is used by one product at a time,
in stream order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.ops.backend import Activation
from triblade.ops.cuda.device import Device, pointer
from triblade.ops.cuda.humming import HummingProducts
from triblade.ops.cuda.packing import CHUNK, DENSE_BITS, TILE_ROWS, DeviceMatrix
from triblade.ops.cuda.tilings import TOKEN_TILE, Tiling, WideTiling, partial_numbers, tiling, wide_tiling

MOST_TOKENS = 64  # of one launch of a streaming kernel
# Up to so many tokens weights are streamed. Beyond, spelling packed weights out once costs less than reading them again, and for
# dense ones, or those of 8 bits spelled out, the library is as fast or faster.
STREAMED_TOKENS = 256
STREAMED_TOKENS_NARROW = 128  # without the warpgroups' instruction
STREAMED_TOKENS_DENSE = 16
NARROW_BITS = 4
WIDE_TOKENS = 17  # from so many on, where the device can
MOST_SETS = 16384  # of rows that share a counter
ROWS, WIDE = 0, 256  # layouts: row after row; inputs of `kernels/wide.cu`, with a number of token tiles


@dataclass(frozen=True, slots=True)
class Activations:
    """Inputs of products. `values` are in the order `layout` of `kernels/layout.cuh`, padded to whole slabs."""

    values: Tensor  # [tokens or more, width]
    tokens: int
    layout: int

    @classmethod
    def empty(cls, tokens: int, width: int, layout: int, dtype: torch.dtype, memory: torch.device) -> Activations:
        """Room for `tokens`."""
        slab = max(1, TOKEN_TILE * (layout & ~WIDE))
        return cls(torch.zeros(-(-tokens // slab) * slab, width, dtype=dtype, device=memory), tokens, layout)

    @property
    def tiles(self) -> int:
        """Tiles of 8 tokens that lie together; 0: row after row."""
        return self.layout & ~WIDE

    def first(self, tokens: int, layout: int) -> Activations:
        """The same memory for fewer tokens."""
        return Activations(self.values, tokens, layout)

    def slab(self, number: int) -> int:
        """Address of the inputs of tokens [64 number, 64 (number + 1))."""
        return self.values.data_ptr() + number * MOST_TOKENS * self.values.shape[1] * self.values.element_size()


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
        ("layout", ctypes.c_int),
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
        self.streamed_tokens = STREAMED_TOKENS if device.has_warpgroups else STREAMED_TOKENS_NARROW
        self._counters = torch.zeros(MOST_SETS, dtype=torch.int32, device=memory)
        self._dense = torch.empty(0, dtype=dtype, device=memory)
        self._package: HummingProducts | None = None

    def multiply_by(self, package: HummingProducts) -> None:
        """Have somebody else multiply what they are faster at; more tokens than a launch takes go row after row from now on."""
        self._package = package
        self.streamed_tokens = min(self.streamed_tokens, MOST_TOKENS)

    def reserve(self, matrices: list[DeviceMatrix]) -> None:
        """Scratch for products with these, made once, since recorded steps keep its address."""
        partial, dense = 0, 0
        if all(matrix.bits > NARROW_BITS for matrix in matrices):
            self.streamed_tokens = STREAMED_TOKENS_DENSE
        for matrix in matrices:
            partial = max(partial, *(partial_numbers(matrix, cut) for cut in self._cuts(matrix)))
            dense = max(dense, matrix.rows * matrix.inputs if matrix.bits != DENSE_BITS else 0)
        self._partial = torch.empty(partial, dtype=torch.float32, device=self._memory)
        self._dense = torch.empty(dense, dtype=self._dtype, device=self._memory)

    def layout(self, tokens: int) -> int:
        """How the inputs of products of so many tokens lie; `ROWS` where the library multiplies."""
        if tokens > self.streamed_tokens:
            return ROWS
        tiles = 1 << (-(-min(tokens, MOST_TOKENS) // TOKEN_TILE) - 1).bit_length()
        return tiles | WIDE if self._device.has_warpgroups and tokens >= WIDE_TOKENS else tiles

    def head_layout(self, tokens: int) -> int:
        """The same for the head, which is dense."""
        return ROWS if tokens > STREAMED_TOKENS_DENSE else self.layout(tokens)

    def inputs(self, tokens: int, width: int) -> Activations:
        """Room for the inputs of a product."""
        return Activations.empty(tokens, width, self.layout(tokens), self._dtype, self._memory)

    def cut(self, matrix: DeviceMatrix, layout: int) -> Tiling | WideTiling:
        """How a product of inputs that lie so is cut."""
        return wide_tiling(matrix, layout & ~WIDE) if layout & WIDE else tiling(matrix, layout)

    def _cuts(self, matrix: DeviceMatrix) -> Sequence[Tiling | WideTiling]:
        many = (4 | WIDE, 8 | WIDE) if self._device.has_warpgroups else (4, 8)
        return [self.cut(matrix, layout) for layout in (1, 2, *many)]

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
        cut = self.cut(matrix, x.layout)
        for slab in range(-(-x.tokens // MOST_TOKENS)):
            self.stream(Product(x, matrix, out, residual, activation), cut, slab)

    def stream(self, product: Product, cut: Tiling | WideTiling, slab: int = 0) -> None:
        """`multiply` with a given tiling, for one slab of up to 64 tokens."""
        x, matrix, out, residual = product.x, product.matrix, product.out, product.residual
        kernel = self._device.kernel(cut.source, cut.kernel, self.constants(matrix, cut, product.activation))
        sets = -(-matrix.rows // (TILE_ROWS * cut.block_tiles))
        part = slice(slab * MOST_TOKENS, min(x.tokens, (slab + 1) * MOST_TOKENS))
        if isinstance(out, Activations):
            output = _Output(out.slab(slab), None, out.values.shape[1], 0, out.layout)
        else:
            beside = None if residual is None else residual[part].data_ptr()
            output = _Output(out[part].data_ptr(), beside, out.shape[1], out.dtype == torch.float32, ROWS)
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
        if self._package is not None and self._package.takes(matrix, len(x)):
            self._multiply_by_package(self._package.multiply(x, matrix), matrix, out, residual, activation)
            return
        weight = self.dequantize(matrix)
        if matrix.is_gated:
            self.gate(F.linear(x, weight, matrix.bias), out, activation)
        elif out.dtype != x.dtype:
            self._logits(x, weight, matrix.bias, out)
        elif residual is not None:  # one rounding less than a sum of its own
            torch.addmm(residual, x, weight.T, out=out)
            if matrix.bias is not None:
                out += matrix.bias
        elif matrix.bias is not None:
            torch.addmm(matrix.bias, x, weight.T, out=out)
        else:
            torch.mm(x, weight.T, out=out)

    def _multiply_by_package(
        self, found: Tensor, matrix: DeviceMatrix, out: Tensor, residual: Tensor | None, activation: Activation
    ) -> None:
        """What is left of a product after a package's part of it."""
        if matrix.is_gated:
            self.gate(found if matrix.bias is None else found + matrix.bias, out, activation)
            return
        for part in (matrix.bias, residual):
            if part is not None:
                found += part
        out.copy_(found)

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """A float32 result, of the sums themselves where the library can."""
        if out.is_cuda:
            torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
        else:
            out.copy_(F.linear(x, weight))
        if bias is not None:
            out += bias

    def gate(self, gate_up: Tensor, out: Tensor, activation: Activation) -> None:
        """out [T, I] = act(gate) * up of the halves of [T, 2 I]."""
        tokens, width = out.shape
        kernel = self._device.kernel("vectors.cu", "gated_activation", {"FLOAT16": int(self._dtype == torch.float16)})
        parts = -(-width // (8 * 256))
        arguments = (pointer(gate_up), pointer(out), ctypes.c_int(width), ctypes.c_int(activation == "gelu_tanh"))
        self._device.launch(kernel, (parts, tokens, 1), 256, arguments)

    def constants(self, matrix: DeviceMatrix, cut: Tiling | WideTiling, activation: Activation) -> dict[str, int]:
        """What is compiled into the kernel of such a product."""
        return {
            "FLOAT16": int(self._dtype == torch.float16),
            "BITS": matrix.bits,
            "GROUP": matrix.group or CHUNK,
            "OFFSETS": int(matrix.offsets is not None),
            "GATED": int(matrix.is_gated),
            "GELU": int(activation == "gelu_tanh"),
            **cut.constants,
        }
