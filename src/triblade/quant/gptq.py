"""GPTQ: choose codes one input at a time and let the inputs not chosen yet take over each error (Frantar et al. 2023).

The Hessian is H = X^T X of a layer's inputs, and the error made is tr(D H D^T) with D the difference of the weights. The levels are
fixed before, group by group in the file's order, so the order of rounding is free: most important inputs first, and no index of
groups has to be stored. Knows no file and no model. Dead inputs (never active) cost nothing and get their nearest code.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from triblade.quant.ranges import Grid

BLOCK = 128
DAMPING = 0.005  # of the mean diagonal
MOST_DAMPING = 1.0  # beyond, the Hessian says nothing

log = logging.getLogger(__name__)


def round_with_feedback(weight: Tensor, hessian: Tensor, grid: Grid, name: str = "matrix") -> Tensor:
    """Codes [out, in] float32 of `weight` on the levels of `grid`.

    Args:
        weight: [out, in] float32.
        hessian: [in, in] float32, X^T X of the inputs, any factor.
        grid: levels of every row and group.
        name: what to call the matrix in a warning.

    Returns:
        The codes; those nearest to the weights, with a warning, if no damping makes the Hessian positive definite.
    """
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order])
    if factor is None:
        log.warning("%s: its Hessian cannot be inverted; rounded to nearest within the searched range", name)
        return grid.codes(weight)
    columns = weight.T[order].contiguous()  # [in, out]: an input's weights side by side
    group = (
        order // (weight.shape[1] // grid.scales.shape[1])
    ).tolist()  # on the host: a lookup there would wait for the device
    scales, zeros = grid.scales.T.contiguous(), grid.zeros.T.contiguous()  # [G, out]
    codes = torch.empty_like(columns)
    for start in range(0, len(columns), BLOCK):
        end = min(start + BLOCK, len(columns))
        errors = torch.empty_like(columns[start:end])
        for i in range(start, end):
            scale, zero = scales[group[i]], zeros[group[i]]
            codes[i] = (columns[i] / scale).add_(zero).round_().clamp_(0, grid.scheme.max_code)
            error = (columns[i] - (codes[i] - zero) * scale) / factor[i, i]
            columns[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
            errors[i - start] = error
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    result = torch.empty_like(codes)
    result[order] = codes
    return result.T.contiguous()


def inverse_factor(hessian: Tensor) -> Tensor | None:
    """Upper U [in, in] float32 with H^-1 = U^T U for the damped Hessian; None if even the strongest damping fails.

    Dead inputs have a zero row and column; a one on their diagonal makes them independent of the rest.
    """
    matrix = hessian.to(torch.float64, copy=True)
    if not torch.isfinite(matrix).all():
        return None
    diagonal = matrix.diagonal().clone()
    mean = diagonal.mean()
    if mean <= 0:
        return torch.eye(len(matrix), dtype=torch.float32, device=matrix.device)
    damping = DAMPING
    while damping <= MOST_DAMPING:
        matrix.diagonal().copy_(
            diagonal + torch.where(diagonal > 0, damping * mean, mean)
        )  # in place: matrices are large
        upper = _inverse_upper(matrix)
        if upper is not None:
            return upper
        damping *= 4
    return None


def _inverse_upper(matrix: Tensor) -> Tensor | None:
    """Upper U float32 with matrix^-1 = U^T U; None if the matrix is not positive definite enough."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        return None
    inverse = torch.cholesky_inverse(factor)
    del factor
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    if failed or not torch.isfinite(upper).all():
        return None
    result: Tensor = upper.float()
    return result


def conditional_variances(hessian: Tensor) -> Tensor:
    """What the rounding error of each input costs after feedback, [in]: its variance given the inputs rounded after it.

    With H = L^T D L in the order of rounding this is D: rounding errors e that are independent cost sum e_i^2 D_i.
    """
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order])
    if factor is None:
        return hessian.diagonal().clone()
    result = torch.empty_like(hessian.diagonal())
    result[order] = factor.diagonal().reciprocal().square()
    return result
