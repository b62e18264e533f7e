"""Make a rounded matrix better under its Hessian: codes one input at a time, scales by least squares. Never worse, row by row.

The error of a row is d H d^T with d = target - rounded. With all other inputs fixed it is a parabola in one weight, so the best
code is the one nearest to the parabola's minimum; with all codes fixed it is a small linear system in the row's scales. Both steps
can only lower the error. Knows no file and no model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from triblade.quant.ranges import Grid, storable

BLOCK = 128
RIDGE = 1e-4  # of the mean diagonal of a row's system


def row_errors(weight: Tensor, rounded: Tensor, hessian: Tensor) -> Tensor:
    """d H d^T for every row: [out]."""
    difference = weight - rounded
    return ((difference @ hessian) * difference).sum(1)


def refine(
    weight: Tensor, hessian: Tensor, grid: Grid, codes: Tensor, scale_type: torch.dtype, rounds: int = 2
) -> tuple[Grid, Tensor]:
    """Alternate between codes and scales.

    Args:
        weight: [out, in] float32, what the product should be made with.
        hessian: [in, in] float32.
        grid: the levels.
        codes: [out, in] float32, to begin with.
        scale_type: the type scales are stored in.
        rounds: how often to do both.

    Returns:
        Levels and codes whose error is at most that of the input, row by row.
    """
    for _ in range(rounds):
        codes = improve_codes(weight, hessian, grid, codes)
        grid = refit_scales(weight, hessian, grid, codes, scale_type)
    return grid, improve_codes(weight, hessian, grid, codes)


def improve_codes(weight: Tensor, hessian: Tensor, grid: Grid, codes: Tensor) -> Tensor:
    """One sweep over the inputs, each code set to the best one given all others: [out, in] float32."""
    inputs = weight.shape[1]
    group_size = inputs // grid.scales.shape[1]
    scales, zeros = grid.scales.T.contiguous(), grid.zeros.T.contiguous()  # [G, out]
    rounded = grid.values(codes).T.contiguous()  # [in, out]
    gradient = hessian @ (weight.T - rounded)  # [in, out]
    curvature = hessian.diagonal()
    is_live = (curvature > 0).tolist()  # all at once: each look at the device waits for it
    result = codes.T.contiguous()
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        local, changes = gradient[start:end], torch.zeros_like(gradient[start:end])
        for i in range(start, end):
            if not is_live[i]:
                continue
            scale, zero = scales[i // group_size], zeros[i // group_size]
            best = rounded[i] + local[i - start] / curvature[i]
            result[i] = (best / scale).add_(zero).round_().clamp_(0, grid.scheme.max_code)
            changes[i - start] = (result[i] - zero) * scale - rounded[i]
            local[i + 1 - start :].addr_(hessian[i + 1 : end, i], changes[i - start], alpha=-1)
        gradient[end:].addmm_(hessian[end:, start:end], changes, alpha=-1)
    return result.T.contiguous()


def refit_scales(weight: Tensor, hessian: Tensor, grid: Grid, codes: Tensor, scale_type: torch.dtype) -> Grid:
    """Scales that minimise each row's error with the codes as they are; a row that would not gain keeps its own.

    With c = code - zero and c_g its part in group g: sum_h (c_g H c_h^T) s_h = c_g H w^T for every g.
    """
    groups = grid.scales.shape[1]
    steps = (codes.unflatten(1, (groups, -1)) - grid.zeros[..., None]).flatten(1)  # [out, in]
    size = steps.shape[1] // groups
    system = steps.new_empty(len(steps), groups, groups)
    for g in range(groups):
        span = slice(g * size, (g + 1) * size)
        system[:, g] = ((steps[:, span] @ hessian[span]) * steps).unflatten(1, (groups, -1)).sum(2)
    right = ((weight @ hessian) * steps).unflatten(1, (groups, -1)).sum(2)  # [out, G]
    mean = system.diagonal(dim1=1, dim2=2).mean(1)  # [out]
    ridge = RIDGE * mean.clamp_min(torch.finfo(torch.float32).tiny)
    system.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    right = right + ridge[:, None] * grid.scales  # towards the scales there are
    fitted, failed = torch.linalg.solve_ex(system, right)
    usable = torch.isfinite(fitted) & (fitted.sign() == grid.scales.sign()) & (failed == 0)[:, None]
    scales = storable(torch.where(usable, fitted, grid.scales), scale_type)
    candidate = replace(grid, scales=scales)
    before = row_errors(weight, grid.values(codes), hessian)
    after = row_errors(weight, candidate.values(codes), hessian)
    return replace(grid, scales=torch.where((after < before)[:, None], scales, grid.scales))
