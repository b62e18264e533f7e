"""What becomes of the biases of a quantized product: kept, corrected for what rounding took from the mean output, or 8-bit levels.

No checkpoint format has a place for the codes of a bias, so an 8-bit bias is stored as the values of its levels in the model's
type: smaller for an engine that makes codes of them again, not smaller as a file. Knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triblade.quant.passes import Work
from triblade.quant.ranges import search_grid
from triblade.quant.refine import row_errors
from triblade.quant.scheme import QuantScheme

GROUPS = (32, 16)  # outputs that share a scale, where they divide all


def corrected_bias(bias: Tensor, work: Work) -> Tensor:
    """The bias [out] plus the mean that rounding, and inputs that drifted, took from the outputs; float32."""
    assert work.statistics is not None
    assert work.grid is not None
    assert work.codes is not None
    lost = (work.weight - work.grid.values(work.codes)) @ work.statistics.mean
    if work.statistics.mean_drift is not None:
        lost = lost + work.weight @ work.statistics.mean_drift
    return bias.float() + lost


def bias_importance(work: Work) -> Tensor:
    """What a squared error of each bias counts, [out]: it is held against the spread of the output that it is added to."""
    if work.statistics is None:
        return work.weight.new_ones(len(work.weight))
    spread = row_errors(work.weight, torch.zeros_like(work.weight), work.statistics.hessian)
    floor = spread.mean() * torch.finfo(torch.float32).eps
    return 1 / spread.clamp_min(floor.clamp_min(torch.finfo(torch.float32).tiny))


def rounded_bias(bias: Tensor, importance: Tensor) -> Tensor:
    """The nearest of 256 levels for every bias [out], in ranges that lose least by importance [out]; float32."""
    row = bias.float()[None]
    group = next((size for size in GROUPS if len(bias) % size == 0), None)
    grid = search_grid(row, importance, QuantScheme(bits=8, group_size=group, symmetric=True), torch.float32)
    return grid.values(grid.codes(row))[0]
