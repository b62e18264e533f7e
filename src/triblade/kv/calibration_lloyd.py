"""Look-up tables for one number each: the levels that round a distribution best (Lloyd 1982, Max 1960), on histograms.

A number in units of its standard deviation falls into one of `BINS` equal bins; a table maps bins to codes and codes to levels. The
optimum is sought on the same bins, so what is measured here is what the codec does. Knows no layer and no model; every row is a
distribution of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 1024
REACH = 7.0  # standard deviations to both sides of the mean; what lies beyond falls into the outermost bins
BIN_WIDTH = 2 * REACH / BINS
MAX_BITS = 8
ROUNDS = 20
PRIOR_TOKENS, PRIOR_WIDTH = 64, 1.5  # a normal distribution, a bit wide: what a small sample does not show of the tails
_SMOOTHING = 9  # bins, for the first guess only


def bin_of(z: Tensor) -> Tensor:
    """Bin of standardised numbers, int32."""
    return ((z + REACH) / BIN_WIDTH).clamp_(0, BINS - 1).to(torch.int32)


def bin_centers() -> Tensor:
    """[BINS]"""
    return (torch.arange(BINS, dtype=torch.float32) + 0.5) * BIN_WIDTH - REACH


def normal_shares(width: float) -> Tensor:
    """[BINS] of a normal distribution of this standard deviation."""
    density = torch.exp(-((bin_centers() / width) ** 2) / 2)
    return density / density.sum()


def histograms(z: Tensor) -> Tensor:
    """Shares [R, BINS] of standardised numbers z [T, R], and of a prior."""
    tokens, rows = z.shape
    flat = bin_of(z).long() + torch.arange(rows) * BINS
    counts = torch.bincount(flat.flatten(), minlength=rows * BINS).view(rows, BINS).float()
    return (counts + PRIOR_TOKENS * normal_shares(PRIOR_WIDTH)) / (tokens + PRIOR_TOKENS)


def lloyd_max(shares: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Levels [R, 2 ** bits], ascending, and mean squared errors [R] in units of the variance, of histograms [R, BINS]."""
    centers = bin_centers()
    sums = [_cumulative(shares * centers**power) for power in range(3)]  # [R, BINS + 1] each
    levels = _first_levels(shares, 2**bits)
    for _ in range(ROUNDS):
        weight, moment = (_cells(total, levels) for total in sums[:2])
        levels = torch.where(weight > 0, moment / weight.clamp_min(1e-30), levels)
    weight, moment, square = (_cells(total, levels) for total in sums)
    error = (square - 2 * levels * moment + levels**2 * weight).sum(-1)
    return levels, (error + BIN_WIDTH**2 / 12).float()  # bins have a width of their own


def codes_of_bins(levels: Tensor) -> Tensor:
    """Code of every bin, uint8 [R, BINS], for levels [R, N]: the nearest one."""
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    centers = bin_centers().to(levels.device).expand(len(levels), -1)
    return torch.searchsorted(middles.contiguous(), centers.contiguous()).to(torch.uint8)


def _cumulative(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros(len(x), 1, dtype=torch.float64), x.double().cumsum(-1)), -1)


def _cells(cumulative: Tensor, levels: Tensor) -> Tensor:
    """Sums over the bins nearest to each level, [R, N]."""
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    ends = ((middles + REACH) / BIN_WIDTH).round().clamp(0, BINS).long()
    edge = torch.zeros(len(levels), 1, dtype=torch.long)
    at = torch.cat((edge, ends, edge + BINS), -1)
    return cumulative.gather(1, at).diff(dim=-1)


def _first_levels(shares: Tensor, count: int) -> Tensor:
    """Levels as dense as the cube root of the density, which many levels should be (Panter and Dite 1951), [R, count] float64."""
    smooth = torch.nn.functional.avg_pool1d(shares[:, None], _SMOOTHING, 1, _SMOOTHING // 2)[:, 0]
    dense = (smooth + 1e-9).double().pow(1 / 3).cumsum(-1)
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count * dense[:, -1:]
    return bin_centers().double()[torch.searchsorted(dense, wanted).clamp(max=BINS - 1)]
