"""Matrices in the layout that the CUDA kernels read: tiles of 16 rows by 64 inputs, as the matrix instruction's registers.

`kernels/linear.cu` says what a lane holds; `unpack` is the inverse and the kernels' twin in tests. Knows nothing of how the numbers
were quantized. Dense matrices stay as they are. In a gated matrix (gate rows, then up rows) a tile is 8 gate rows and their 8 up
rows, so that one lane has both halves of a result. Invariant: inputs are a multiple of 64 and of the group; padding rows are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from triblade.ops.backend import Linear
from triblade.ops.packing import ZERO_POINT, QuantizedMatrix

TILE_ROWS, CHUNK = 16, 64
GROUPS = (32, 64, 128)
DENSE_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMatrix:
    """A matrix as the kernels multiply it."""

    bits: int  # 4 or 8; 16: dense
    rows: int
    inputs: int
    group: int  # inputs per scale; 0: dense
    codes: Tensor  # uint8 [tiles, chunks, bits / 4, 32 lanes, 16 bytes]; dense: [rows, inputs] of the activations' type
    scales: Tensor | None = None  # float16 [tiles, groups, 8, 2]: rows g and g + 8
    offsets: Tensor | None = None
    bias: Tensor | None = None  # [rows] of the activations' type, in the order of the matrix
    tile_bias: Tensor | None = None  # [rows] float32 in the order of the tiles
    is_gated: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.offsets) if part is not None)


def why_not_packed(inputs: int, group: int) -> str | None:
    """What keeps the kernels from multiplying codes of such a matrix, or None."""
    if group not in GROUPS:
        return f"groups of {group} inputs (CUDA kernels: {', '.join(map(str, GROUPS))})"
    return why_not_dense(inputs) or (f"{inputs} inputs in groups of {group}" if inputs % group else None)


def why_not_dense(inputs: int) -> str | None:
    """The same for a matrix that is not quantized."""
    return f"{inputs} inputs (CUDA kernels: a multiple of {CHUNK})" if inputs % CHUNK else None


def finer_groups(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The same matrix with scales repeated for groups that the kernels know, where they divide its own."""
    group = next((group for group in reversed(GROUPS) if matrix.group % group == 0), matrix.group)
    repeats = matrix.group // group
    offsets = None if matrix.offsets is None else matrix.offsets.repeat_interleave(repeats, 1)
    return replace(matrix, scales=matrix.scales.repeat_interleave(repeats, 1), offsets=offsets)


def pack_codes(matrix: QuantizedMatrix, dtype: torch.dtype, *, is_gated: bool = False) -> DeviceMatrix:
    """Pack int4 or int8 codes, on the device where they are; see `why_not_packed`."""
    rows, inputs = matrix.codes.shape
    order = tile_order(rows).to(matrix.codes.device) if is_gated else None
    ordered = matrix if order is None else matrix.rows(order)
    # Axes: tile, row / 8, g, chunk, h, t, s, p, e: input 32 h + 8 t + 4 s + 2 p + e of the chunk.
    axes = _pad_rows(ordered.codes).view(-1, 2, 8, inputs // CHUNK, 2, 4, 2, 2, 2)
    if matrix.bits == 4:
        upper, lower = axes.permute(1, 0, 3, 2, 5, 4, 6, 8, 7).flip(0).unbind(0)  # [tile, chunk, g, t, h, s, e, p] each
        packed = lower | upper << 4
    else:
        packed = axes.permute(0, 3, 4, 2, 5, 6, 7, 1, 8)
    return DeviceMatrix(
        bits=matrix.bits,
        rows=rows,
        inputs=inputs,
        group=matrix.group,
        codes=packed.contiguous().view(-1, inputs // CHUNK, matrix.bits // 4, 32, 16),
        scales=_pack_groups(ordered.scales),
        offsets=None if ordered.offsets is None else _pack_groups(ordered.offsets),
        bias=None if matrix.bias is None else matrix.bias.to(dtype),
        tile_bias=None if ordered.bias is None else ordered.bias.float(),
        is_gated=is_gated,
    )


def pack_dense(linear: Linear, *, is_gated: bool = False) -> DeviceMatrix:
    """A dense matrix, not copied."""
    rows, inputs = linear.weight.shape
    bias = linear.bias
    tile_bias = None
    if bias is not None:
        tile_bias = (bias[tile_order(rows).to(bias.device)] if is_gated else bias).float()
    weight = linear.weight.contiguous()
    return DeviceMatrix(
        bits=DENSE_BITS,
        rows=rows,
        inputs=inputs,
        group=0,
        codes=weight,
        bias=bias,
        tile_bias=tile_bias,
        is_gated=is_gated,
    )


def unpack(matrix: DeviceMatrix) -> Tensor:
    """The matrix [rows, inputs] float32 that the kernels multiply, in its own order."""
    if matrix.bits == DENSE_BITS:
        return matrix.codes.float()
    found = unpack_codes(matrix)
    scales = found.scales.float()
    offsets = -ZERO_POINT[matrix.bits] * scales if found.offsets is None else found.offsets.float()
    groups = found.codes.view(matrix.rows, -1, matrix.group).float()  # [rows, G, group]
    return (groups * scales.unsqueeze(-1) + offsets.unsqueeze(-1)).flatten(1)


def unpack_codes(matrix: DeviceMatrix) -> QuantizedMatrix:
    """What `pack_codes` was given, in its own order."""
    chunks = matrix.inputs // CHUNK
    if matrix.bits == 4:
        packed = matrix.codes.view(-1, chunks, 8, 4, 2, 2, 2, 2)  # [tile, chunk, g, t, h, s, e, p]
        halves = torch.stack((packed & 15, packed >> 4))  # [row / 8, ...]
        codes = halves.permute(1, 0, 3, 2, 5, 4, 6, 8, 7)
    else:
        packed = matrix.codes.view(-1, chunks, 2, 8, 4, 2, 2, 2, 2)  # [tile, chunk, h, g, t, s, p, row / 8, e]
        codes = packed.permute(0, 7, 3, 1, 2, 4, 5, 6, 8)
    assert matrix.scales is not None
    order = torch.arange(matrix.rows)  # where a row of the matrix lies
    if matrix.is_gated:
        order = tile_order(matrix.rows).argsort()
    order = order.to(codes.device)
    return QuantizedMatrix(
        codes=codes.reshape(-1, matrix.inputs)[order],
        scales=_unpack_groups(matrix.scales)[order],
        offsets=None if matrix.offsets is None else _unpack_groups(matrix.offsets)[order],
        bits=matrix.bits,
        bias=matrix.bias,
    )


def tile_order(rows: int) -> Tensor:
    """Rows of a gated matrix [2 I, in] in the order of its tiles: 8 gate rows, the 8 up rows that belong to them, and so on."""
    half = torch.arange(rows // 2).view(-1, TILE_ROWS // 2)
    return torch.stack((half, half + rows // 2), 1).flatten()


def _pad_rows(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % TILE_ROWS))


def _pack_groups(values: Tensor) -> Tensor:
    """[rows, G] -> [tiles, G, 8, 2]."""
    return _pad_rows(values).half().view(-1, 2, 8, values.shape[1]).permute(0, 3, 2, 1).contiguous()


def _unpack_groups(packed: Tensor) -> Tensor:
    """[tiles, G, 8, 2] -> [padded rows, G]."""
    return packed.permute(0, 3, 2, 1).reshape(-1, packed.shape[1])
