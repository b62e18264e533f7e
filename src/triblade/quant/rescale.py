"""Scales per input channel that make a matrix easier to round: W diag(s) is quantized, and x / s is made by whoever makes x.

Three searches. `activation_scales` is AWQ (Lin et al. 2023): s = magnitude^a, the exponent with the least output error when
rounded to nearest. `balanced_scales` lowers the error expected *after* GPTQ's feedback: a rounding error in column j costs D_j,
its variance given the columns rounded later; scaling makes that D_j / s_j^2. The step of a group is its range. So the error is

    sum over rows r and groups g of range_rg(s)^2 * sum over j in g of D_j / s_j^2,

a smooth enough function of log s for plain gradient steps. `migration_scales` is SmoothQuant's form (Xiao et al. 2023) for weights
and activations of 8 bits: it trades large inputs for large weights so that the sum of both rounding errors is least. Knows no
model: which channels must share a scale is an argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triblade.quant.gptq import conditional_variances
from triblade.quant.ranges import plain_grid
from triblade.quant.refine import row_errors
from triblade.quant.scheme import QuantScheme
from triblade.quant.statistics import InputStatistics

EXPONENTS = tuple(step / 20 for step in range(20))  # AWQ's grid
VARIANCE_POWERS = tuple(step / 10 for step in range(9))  # where the gradient steps may begin
WEIGHT_POWERS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
GRADIENT_STEPS = 50
ROWS_LOOKED_AT = 1024  # of a matrix: every channel has that many weights to balance, and more change nothing
LEARNING_RATE = 0.05
LARGEST_SCALE = 1e3  # of a channel, against the geometric mean of all; the smallest is one over it


def activation_scales(
    weight: Tensor, statistics: InputStatistics, scheme: QuantScheme, sharing: Tensor | None = None
) -> Tensor:
    """AWQ's scales.

    Args:
        weight: [out, in] float32.
        statistics: of the inputs.
        scheme: how the matrix will be rounded.
        sharing: [in] number of the scale that each channel takes; None: each its own.

    Returns:
        [in] positive; all ones if no exponent gives a smaller, finite error.
    """
    magnitude = _shared_mean(statistics.magnitude, sharing)
    best, least = torch.ones_like(magnitude), torch.inf
    for exponent in EXPONENTS:
        scales = _normalized(magnitude.pow(exponent))
        scaled = weight * scales
        grid = plain_grid(scaled, scheme, torch.float32)
        rounded = grid.values(grid.codes(scaled)) / scales
        error = row_errors(weight, rounded, statistics.hessian).sum().item()
        if error < least:
            best, least = scales, error
    return best


def balanced_scales(
    weight: Tensor, statistics: InputStatistics, scheme: QuantScheme, sharing: Tensor | None = None
) -> Tensor:
    """Scales with the least expected error after feedback; arguments and result as for `activation_scales`."""
    variances = conditional_variances(statistics.hessian)
    weight = weight[:: -(-len(weight) // ROWS_LOOKED_AT)]
    start = _best_powers(weight, variances, scheme, sharing)
    free = _per_scale(start.log(), sharing).clone().requires_grad_()
    optimizer = torch.optim.Adam([free], lr=LEARNING_RATE)
    best, least = start, torch.inf
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(GRADIENT_STEPS):
            scales = _per_channel(free, sharing).exp()
            loss = _expected_error(weight, variances, scales, scheme).log()
            if loss.item() < least:
                best, least = scales.detach().clone(), loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return _normalized(best)


def migration_scales(
    weight: Tensor, statistics: InputStatistics, scheme: QuantScheme, sharing: Tensor | None = None
) -> Tensor:
    """Scales peak^a * largest weight^(a - 1) with the least expected error; arguments and result as for `activation_scales`."""
    peak = _shared_mean(statistics.peak, sharing)
    largest = _shared_mean(weight.abs().amax(0), sharing)
    second = statistics.hessian.diagonal()
    best, least = torch.ones_like(peak), torch.inf
    for exponent in (None, *EXPONENTS):
        scales = (
            torch.ones_like(peak) if exponent is None else _normalized(peak.pow(exponent) * largest.pow(exponent - 1))
        )
        scaled = weight * scales
        step = (statistics.peak / scales).amax()  # of a token's inputs, at worst
        from_inputs = step.square() * scaled.square().sum()
        from_weights = scaled.abs().amax(1).square().sum() * (second / scales.square()).sum()
        error = (from_inputs + from_weights).item()
        if error < least:
            best, least = scales, error
    return best


def _best_powers(weight: Tensor, variances: Tensor, scheme: QuantScheme, sharing: Tensor | None) -> Tensor:
    """The best scales of the form spread^a * largest weight^-b."""
    spread = _shared_mean(variances.sqrt(), sharing)
    largest = _shared_mean(weight.abs().amax(0), sharing)
    best, least = torch.ones_like(spread), torch.inf
    for a in VARIANCE_POWERS:
        for b in WEIGHT_POWERS:
            scales = _normalized(spread.pow(a) * largest.pow(-b))
            error = _expected_error(weight, variances, scales, scheme).item()
            if error < least:
                best, least = scales, error
    return best


def _expected_error(weight: Tensor, variances: Tensor, scales: Tensor, scheme: QuantScheme) -> Tensor:
    """The sum in this file's head, up to a constant factor; tiny and positive if there is nothing to lose."""
    groups = (weight * scales).unflatten(1, (scheme.groups(weight.shape[1]), -1))  # [out, G, g]
    low, high = groups.amin(2).clamp_max(0.0), groups.amax(2).clamp_min(0.0)
    ranges = torch.maximum(-low, high) if scheme.symmetric else high - low
    costs = (variances / scales.square()).unflatten(0, groups.shape[1:]).sum(1)  # [G]
    total: Tensor = (ranges.square().sum(0) * costs).sum() + torch.finfo(torch.float32).tiny
    return total


def _normalized(scales: Tensor) -> Tensor:
    """Geometric mean 1, within limits."""
    return (scales / scales.log().mean().exp()).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)


def _shared_mean(values: Tensor, sharing: Tensor | None) -> Tensor:
    """Positive values [in], equal where the scale is shared: the geometric mean; dead channels get the smallest live value."""
    live = values > 0
    floor = values[live].amin() if live.any() else values.new_ones(())
    values = torch.where(live, values, floor).clamp_min(values.amax() * 1e-4)
    return _per_channel(_per_scale(values.log(), sharing), sharing).exp()


def _per_scale(values: Tensor, sharing: Tensor | None) -> Tensor:
    """Means over the channels that share a scale: [in] -> [number of scales]."""
    if sharing is None:
        return values
    count = int(sharing.max()) + 1
    sums = values.new_zeros(count).index_add_(0, sharing, values)
    means: Tensor = sums / torch.bincount(sharing, minlength=count)
    return means


def _per_channel(values: Tensor, sharing: Tensor | None) -> Tensor:
    result: Tensor = values if sharing is None else values[sharing]
    return result
