"""Aim a matrix at what the product should have been, had nothing before it been quantized.

The inputs x of a layer in the quantized model differ from the original's o, and the residual stream that its product is added to
lacks r. The weights that make up for both best are the least-squares solution, W + (W E[(o - x) x^T] + E[r x^T]) (H + damping)^-1,
where damping keeps directions that calibration hardly saw at W. The first part is the idea of GPTAQ (Li et al. 2025) in closed
form. Knows no grid: rounding follows, towards the new weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triblade.quant.statistics import InputStatistics

DAMPING = 0.02  # of the mean diagonal
MOST_DAMPING = 10.0


def corrected_weight(weight: Tensor, statistics: InputStatistics) -> Tensor:
    """The weights [out, in] float32 to round towards; `weight` itself if there is nothing to correct or no solution."""
    if statistics.drift is None:
        return weight
    lack = weight @ statistics.drift  # [out, in]
    if statistics.residual is not None:
        lack = lack + statistics.residual
    damped = statistics.hessian.to(torch.float64, copy=True)
    diagonal = damped.diagonal().clone()
    mean = diagonal.mean()
    damping = DAMPING
    while damping <= MOST_DAMPING and mean > 0:
        damped.diagonal().copy_(diagonal + damping * mean)  # in place: matrices are large
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return weight + torch.cholesky_solve(lack.T.double(), factor).T.float()
        damping *= 4
    return weight
