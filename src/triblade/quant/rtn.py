"""Round to nearest: the plainest way from weights to codes, quick enough to do while loading.

Symmetric with one float16 scale per row and group; a group's scale is the best of a few shrunken ones by squared error. No
calibration, so quality is what it is: see `triblade convert` for better checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triblade.ops.packing import ZERO_POINT, QuantizedMatrix

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
CELLS_AT_ONCE = {"cpu": 2**18, "cuda": 2**24}  # bounds the temporaries of a large matrix to a few times 1 or 64 MiB


def round_to_nearest(weight: Tensor, bits: int, group: int, bias: Tensor | None = None) -> QuantizedMatrix:
    """Quantize [out, in]; `group` divides `in`."""
    at_once = max(1, CELLS_AT_ONCE.get(weight.device.type, CELLS_AT_ONCE["cpu"]) // weight.shape[1])
    codes = torch.empty_like(weight, dtype=torch.uint8)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group, dtype=torch.float16, device=weight.device)
    for rows, row_codes, row_scales in zip(*(part.split(at_once) for part in (weight, codes, scales)), strict=True):
        found_codes, found_scales = _round_rows(rows, bits, group)
        row_codes.copy_(found_codes)
        row_scales.copy_(found_scales)
    return QuantizedMatrix(codes=codes, scales=scales, offsets=None, bits=bits, bias=bias)


def _round_rows(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes [out, in] uint8 and scales [out, G] float16."""
    groups = rows.float().unflatten(1, (-1, group))  # [out, G, group]
    zero = ZERO_POINT[bits]
    # The largest magnitude takes the end of the range that has one step more.
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))  # [out, G, 1]
    best_error, best_scale = torch.full_like(extreme, torch.inf), torch.zeros_like(extreme)
    for shrink in SHRINKS if bits == 4 else SHRINKS[:1]:
        scale = (extreme * shrink / -zero).half().float()
        error = (_values(_codes(groups, scale, zero), scale, zero) - groups).square().sum(2, keepdim=True)
        better = error < best_error
        best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
    return _codes(groups, best_scale, zero).to(torch.uint8).flatten(1), best_scale.squeeze(2).half()


def _codes(groups: Tensor, scale: Tensor, zero: int) -> Tensor:
    safe = torch.where(scale == 0, 1.0, scale)
    return (groups / safe).round_().add_(zero).clamp_(0, 2 * zero - 1)


def _values(codes: Tensor, scale: Tensor, zero: int) -> Tensor:
    return (codes - zero) * scale
