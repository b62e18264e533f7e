"""Products of many tokens in integers: inputs rounded to 8 bits with a scale per token, weights with a scale per row.

For checkpoints that were made for it (W8A8); few tokens are multiplied as they are, which is no less exact. The product itself is
the library's. Knows no model. Source of the scheme: LLM.int8 (Dettmers et al. 2022, section 2.1, vector-wise quantization).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from triblade.ops.cuda.device import Device, pointer
from triblade.ops.cuda.packing import CHUNK, TILE_ROWS, DeviceMatrix

THREADS = 256
WARPS = 4


class IntegerProducts:
    """Kernels around `torch._int_mm`.

    Args:
        device: where they run.
        dtype: of activations.
    """

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self._device = device
        self._constants = {"FLOAT16": int(dtype == torch.float16)}

    def multiply(
        self, x: Tensor, matrix: DeviceMatrix, scratch: Tensor, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """out [T, N] = x [T, in] W^T + b (+ residual [T, N], which may be `out`); `scratch` holds the codes as bytes."""
        assert matrix.row_scales is not None
        tokens, rows = len(x), matrix.rows
        codes = self.rows_of(matrix, scratch)
        rounded, scales = self.round_tokens(x.contiguous())
        sums = torch._int_mm(rounded, codes.T)  # int32 [T, N]
        arguments = [pointer(t) for t in (sums, scales, matrix.row_scales, matrix.bias, residual, out)]
        grid = (-(-rows // (2 * THREADS)), tokens, 1)
        kernel = self._device.kernel("int8.cu", "rescale", self._constants)
        self._device.launch(kernel, grid, THREADS, [*arguments, ctypes.c_int(rows)])

    def round_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [T, in] int8 and scales [T] float32 of x [T, in]."""
        rounded = torch.empty(x.shape, dtype=torch.int8, device=x.device)
        scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
        kernel = self._device.kernel("int8.cu", "round_tokens", self._constants)
        arguments = [pointer(x), pointer(rounded), pointer(scales), ctypes.c_int(x.shape[1])]
        self._device.launch(kernel, (len(x), 1, 1), THREADS, arguments)
        return rounded, scales

    def rows_of(self, matrix: DeviceMatrix, scratch: Tensor) -> Tensor:
        """The codes [N, in] int8, zero at 0, in `scratch`."""
        size = matrix.rows * matrix.inputs
        out = scratch.view(torch.int8)[:size].view(matrix.rows, matrix.inputs)
        kernel = self._device.kernel("int8.cu", "codes_to_rows", self._constants)
        numbers = map(ctypes.c_int, (matrix.rows, matrix.inputs, int(matrix.is_gated)))
        grid = (-(-matrix.inputs // CHUNK // WARPS), -(-matrix.rows // TILE_ROWS), 1)
        self._device.launch(kernel, grid, 32 * WARPS, [pointer(matrix.codes), pointer(out), *numbers])
        return out
