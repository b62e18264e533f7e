"""From a checkpoint's codes to those the native kernels multiply, without a second rounding of a weight.

Kernels know 4 and 8 bits, groups of whole lanes, and float16 scales with an offset in place of a zero point. Codes of 2 and 3
bits become 4-bit ones. Projections that share an input are one matrix, so one form for all of them: the most bits, the finest
groups, offsets if one has zero points. Weights stay what they are; only an offset is rounded, to float16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triblade.ops.packing import BLOCK_ROWS, ZERO_POINT, QuantizedMatrix
from triblade.quant.scheme import IntegerMatrix, QuantScheme

LANES = 16  # a group of inputs is rounded in steps of as many
# Inputs are rounded in the groups of the weights. A row that is one group gets finer ones, all with its scale.
_ROW_GROUPS = (128, 64, 32, 16)
_SCALE_ERROR = 2.0**-10  # of the row's largest scale: a thousandth of a rounding step


@dataclass(frozen=True, slots=True)
class KernelForm:
    """How a matrix is multiplied."""

    bits: int  # 4 or 8
    group: int
    has_offsets: bool

    def num_bytes(self, rows: int, inputs: int) -> int:
        """Memory of codes, scales and offsets, rows padded to whole blocks."""
        padded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
        return padded * inputs * self.bits // 8 + padded * (inputs // self.group) * 2 * (2 if self.has_offsets else 1)


def kernel_form(scheme: QuantScheme, inputs: int) -> KernelForm | None:
    """The form of a matrix alone; None: no kernel multiplies such groups."""
    group = scheme.group(inputs)
    if scheme.group_size is None and scheme.activation_bits is None:
        group = next((size for size in _ROW_GROUPS if inputs % size == 0), group)
    if group % LANES:
        return None
    return KernelForm(8 if scheme.bits == 8 else 4, group, not scheme.symmetric)


def joint_form(forms: Sequence[KernelForm]) -> KernelForm:
    """The form in which all of several can be written exactly."""
    return KernelForm(
        max(form.bits for form in forms),
        math.gcd(*(form.group for form in forms)),
        any(form.has_offsets for form in forms),
    )


def kernel_matrix(matrix: IntegerMatrix, form: KernelForm) -> QuantizedMatrix | None:
    """The matrix in a form that holds it; None: float16 does not hold its scales."""
    scales = _half(matrix.scales)
    if scales is None:
        return None
    repeats = matrix.codes.shape[1] // form.group // scales.shape[1]
    if not form.has_offsets:
        shift = ZERO_POINT[form.bits] - matrix.scheme.zero_point
        return QuantizedMatrix(
            codes=matrix.codes + shift, scales=scales.repeat_interleave(repeats, 1), offsets=None, bits=form.bits
        )
    zeros = matrix.scheme.zero_point if matrix.zero_points is None else matrix.zero_points.float()
    offsets = (-scales.float() * zeros).half()
    return QuantizedMatrix(
        codes=matrix.codes,
        scales=scales.repeat_interleave(repeats, 1),
        offsets=offsets.repeat_interleave(repeats, 1),
        bits=form.bits,
    )


def joined(matrices: Sequence[QuantizedMatrix], bias: Tensor | None) -> QuantizedMatrix:
    """Rows of matrices of one form, one after the other."""
    if len(matrices) == 1:
        return replace(matrices[0], bias=bias)
    offsets = [matrix.offsets for matrix in matrices if matrix.offsets is not None]
    return QuantizedMatrix(
        codes=torch.cat([matrix.codes for matrix in matrices]),
        scales=torch.cat([matrix.scales for matrix in matrices]),
        offsets=torch.cat(offsets) if offsets else None,
        bits=matrices[0].bits,
        bias=bias,
    )


def _half(scales: Tensor) -> Tensor | None:
    """Scales [out, G] as float16: exact for bfloat16 within its range, otherwise as good as a rounding step allows; or None."""
    exact, rounded = scales.float(), scales.half()
    allowed = exact.abs().amax(1, keepdim=True) * _SCALE_ERROR
    return rounded if bool(((rounded.float() - exact).abs() <= allowed).all()) else None
