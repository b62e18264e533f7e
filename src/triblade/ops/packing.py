"""Matrices in the layout that the native kernels read: 16 output rows side by side, inputs in the order of the dot instructions.

The layouts are those described in `csrc/kernels.h`; `unpack` is the inverse and the kernels' twin in tests. Knows nothing of how
the numbers were quantized. Outputs are padded to whole blocks of 16 rows, inputs to whole groups; padding is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ROWS = 16
ZERO_POINT = {4: 8, 8: 128}  # of symmetric codes


class Format(IntEnum):
    """As `Format` in csrc/kernels.h."""

    INT4 = 0
    INT8 = 1
    BF16 = 2
    FP32 = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """Integer codes with a scale per row and group: w = scale * code + offset; no offsets: offset = -scale * ZERO_POINT."""

    codes: Tensor  # [out, in] uint8
    scales: Tensor  # [out, in / group] float16
    offsets: Tensor | None  # [out, in / group] float16
    bits: int  # 4 or 8
    bias: Tensor | None = None  # [out]

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> Tensor:
        """The matrix [out, in] float32."""
        codes: Tensor = self.codes.float().unflatten(1, (-1, self.group))  # [out, G, group]
        scales = self.scales.float()[..., None]
        if self.offsets is None:
            return ((codes - ZERO_POINT[self.bits]) * scales).flatten(1)
        return (codes * scales + self.offsets.float()[..., None]).flatten(1)

    def rows(self, order: Tensor) -> QuantizedMatrix:
        """The matrix with its rows picked or reordered, by number [N] int64."""
        return QuantizedMatrix(
            codes=self.codes[order],
            scales=self.scales[order],
            offsets=None if self.offsets is None else self.offsets[order],
            bits=self.bits,
            bias=None if self.bias is None else self.bias[order],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """Tensors whose memory a native `Matrix` points to."""

    format: Format
    num_rows: int
    num_inputs: int  # padded
    group: int
    weights: Tensor  # uint8
    scales: Tensor | None = None  # [blocks, G, 16] float16
    offsets: Tensor | None = None
    bias: Tensor | None = None  # [blocks * 16] float32

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """The tensors there are, by field."""
        named = {name: getattr(self, name) for name in ("weights", "scales", "offsets", "bias")}
        return {name: part for name, part in named.items() if part is not None}


def pack_quantized(matrix: QuantizedMatrix) -> PackedMatrix:
    """Pack int4 or int8 codes."""
    codes = _pad_rows(matrix.codes)
    num_inputs = codes.shape[1]
    blocks = codes.view(-1, BLOCK_ROWS, num_inputs)
    if matrix.bits == 4:
        low, high = blocks.unflatten(2, (-1, 2, 4)).unbind(3)  # [B, 16, K / 8, 4] each
        weights = (low | high << 4).permute(0, 2, 1, 3)
    else:
        weights = blocks.unflatten(2, (-1, 4)).permute(0, 2, 1, 3)  # [B, K / 4, 16, 4]
    return PackedMatrix(
        format=Format.INT4 if matrix.bits == 4 else Format.INT8,
        num_rows=matrix.codes.shape[0],
        num_inputs=num_inputs,
        group=matrix.group,
        weights=weights.contiguous(),
        scales=_pack_groups(matrix.scales),
        offsets=None if matrix.offsets is None else _pack_groups(matrix.offsets),
        bias=_pack_bias(matrix.bias),
    )


def pack_dense(weight: Tensor, bias: Tensor | None) -> PackedMatrix:
    """Pack [out, in] as bfloat16 if it is that, as float32 otherwise."""
    is_bf16 = weight.dtype == torch.bfloat16
    rows = _pad_rows(weight if is_bf16 else weight.float())
    rows = F.pad(rows, (0, rows.shape[1] % 2)) if is_bf16 else rows
    blocks = rows.view(-1, BLOCK_ROWS, rows.shape[1])
    weights = blocks.unflatten(2, (-1, 2)).permute(0, 2, 1, 3) if is_bf16 else blocks.permute(0, 2, 1)
    return PackedMatrix(
        format=Format.BF16 if is_bf16 else Format.FP32,
        num_rows=weight.shape[0],
        num_inputs=rows.shape[1],
        group=0,
        weights=weights.contiguous().view(torch.uint8),
        bias=_pack_bias(bias),
    )


def unpack(packed: PackedMatrix) -> Tensor:
    """The matrix [out, padded in] float32 that the kernels multiply, padding rows left out."""
    inputs, blocks = packed.num_inputs, -(-packed.num_rows // BLOCK_ROWS)
    if packed.format == Format.FP32:
        rows = packed.weights.view(torch.float32).view(blocks, inputs, BLOCK_ROWS).transpose(1, 2)
    elif packed.format == Format.BF16:
        pairs = packed.weights.view(torch.bfloat16).view(blocks, inputs // 2, BLOCK_ROWS, 2)
        rows = pairs.transpose(1, 2).flatten(2).float()
    else:
        rows = _unpack_integers(packed, blocks)
    return rows.reshape(-1, inputs)[: packed.num_rows]


def _unpack_integers(packed: PackedMatrix, blocks: int) -> Tensor:
    """[blocks, 16, in] float32."""
    if packed.format == Format.INT4:
        halves = packed.weights.view(blocks, -1, BLOCK_ROWS, 4)  # [B, K / 8, 16, 4]
        codes = torch.stack((halves & 15, halves >> 4), 3).permute(0, 2, 1, 3, 4).flatten(2)
    else:
        codes = packed.weights.view(blocks, -1, BLOCK_ROWS, 4).transpose(1, 2).flatten(2)
    assert packed.scales is not None
    scales = packed.scales.float().transpose(1, 2)[..., None]  # [B, 16, G, 1]
    zero = ZERO_POINT[4 if packed.format == Format.INT4 else 8]
    offsets = -zero * scales if packed.offsets is None else packed.offsets.float().transpose(1, 2)[..., None]
    groups: Tensor = codes.float().unflatten(2, (-1, packed.group))  # [B, 16, G, group]
    return (groups * scales + offsets).flatten(2)


def interleaved_halves(num_rows: int) -> Tensor:
    """Order [num_rows] of the rows of a gate-up matrix in which blocks of 16 gate rows and 16 up rows alternate."""
    half = torch.arange(num_rows // 2).view(-1, BLOCK_ROWS)
    return torch.stack((half, half + num_rows // 2), 1).flatten()


def _pad_rows(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, -rows.shape[0] % BLOCK_ROWS))


def _pack_groups(values: Tensor) -> Tensor:
    return _pad_rows(values).half().view(-1, BLOCK_ROWS, values.shape[1]).permute(0, 2, 1).contiguous()


def _pack_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else F.pad(bias.float(), (0, -bias.shape[0] % BLOCK_ROWS))
