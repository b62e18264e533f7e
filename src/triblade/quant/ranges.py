"""Where the levels of every row and group lie: the search for scales and integer zero points under all methods.

The error of an input counts by its importance, the second moment of what it multiplies, so that a group gives up what hardly
matters. A scale is rounded to the type it is stored in before any code is chosen. Knows no Hessian and no calibration; rows
are independent, so the result does not depend on how many are searched at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triblade.errors import NumericalError
from triblade.quant.scheme import IntegerMatrix, QuantScheme

ELEMENTS_AT_ONCE = 2**18  # of a piece of rows, so that its copies stay in a core's cache
SHRINKS = {2: 14, 3: 10, 4: 8, 8: 2}  # bits -> shrink factors tried, SHRINK_STEP apart
SHRINK_STEP = 0.05
EDGE_STEPS = (0.04, 0.02)  # how far one end of a range is moved alone, as shares of the range
REFIT_ROUNDS = 3
IMPORTANCE_FLOOR = 1e-4  # of the mean: an input that calibration never saw may still be seen


@dataclass(frozen=True, slots=True)
class Grid:
    """The levels of a matrix: scale * (code - zero) for integer codes from 0 to the scheme's largest."""

    scales: Tensor  # [out, G] float32 with values of the storage type; may be negative where the scheme is symmetric
    zeros: Tensor  # [out, G] float32, whole numbers
    scheme: QuantScheme

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest codes of [out, in], as float32."""
        groups: Tensor = weight.unflatten(1, (self.scales.shape[1], -1))
        return _codes(groups, self.scales[..., None], self.zeros[..., None], self.scheme.max_code).flatten(1)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [out, in] stand for."""
        groups: Tensor = codes.unflatten(1, (self.scales.shape[1], -1))
        return ((groups - self.zeros[..., None]) * self.scales[..., None]).flatten(1)

    def rows(self, rows: slice) -> Grid:
        """The levels of some rows."""
        return replace(self, scales=self.scales[rows], zeros=self.zeros[rows])

    def matrix(self, codes: Tensor, scale_type: torch.dtype, bias: Tensor | None = None) -> IntegerMatrix:
        """Codes [out, in] and these levels in the form that is stored."""
        return IntegerMatrix(
            codes=codes.to(torch.uint8),
            scales=self.scales.to(scale_type),
            zero_points=None if self.scheme.symmetric else self.zeros.to(torch.uint8),
            scheme=self.scheme,
            bias=bias,
        )


def search_grid(weight: Tensor, importance: Tensor | None, scheme: QuantScheme, scale_type: torch.dtype) -> Grid:
    """Scales and zero points that lose least of [out, in].

    Args:
        weight: float32.
        importance: [in], not negative: what the squared error of an input counts; None or all zero: the same for all.
        scheme: bits, group and symmetry.
        scale_type: the type scales are stored in.

    Raises:
        NumericalError: weight or importance is not finite.
    """
    inputs = weight.shape[1]
    groups = weight.unflatten(1, (scheme.groups(inputs), -1))  # [out, G, g]
    weights = _weights(importance, weight).unflatten(0, groups.shape[1:])  # [G, g]
    at_once = max(1, ELEMENTS_AT_ONCE // inputs)
    found = [_search(piece, weights, scheme, scale_type) for piece in groups.split(at_once)]
    scales, zeros = (torch.cat([pair[part] for pair in found]) for part in (0, 1))
    return Grid(scales, zeros, scheme)


def plain_grid(weight: Tensor, scheme: QuantScheme, scale_type: torch.dtype) -> Grid:
    """Levels from the smallest to the largest weight of each group: what rounding to nearest uses, and the search starts from."""
    groups = weight.unflatten(1, (scheme.groups(weight.shape[1]), -1))
    low, high = _extremes(groups)
    scales, zeros = _levels(low, high, scheme, scale_type)
    return Grid(scales, zeros, scheme)


def storable(scales: Tensor, scale_type: torch.dtype) -> Tensor:
    """`scales` rounded to their storage type, as float32; what would vanish or overflow becomes the nearest that does not.

    A group of zeros gets scale 1: every code but zero's is unused.
    """
    limits = torch.finfo(scale_type)
    size = scales.abs().clamp(limits.smallest_normal, limits.max).to(scale_type).float()
    return torch.where(scales == 0, 1.0, torch.where(scales < 0, -size, size))


def _weights(importance: Tensor | None, weight: Tensor) -> Tensor:
    """Importance [in] that is positive everywhere."""
    if not torch.isfinite(weight).all():
        raise NumericalError("a weight is not finite", hint="the checkpoint is damaged; fetch it again")
    if importance is None or not importance.any():
        return weight.new_ones(weight.shape[1])
    if not torch.isfinite(importance).all():
        raise NumericalError("an activation of the calibration text is not finite")
    return importance / importance.mean() + IMPORTANCE_FLOOR


def _extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each group, zero included: [out, G] each."""
    return groups.amin(2).clamp_max(0.0), groups.amax(2).clamp_min(0.0)


def _levels(low: Tensor, high: Tensor, scheme: QuantScheme, scale_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero point of ranges from `low` to `high`."""
    if scheme.symmetric:
        # The larger side takes the end that has one step more, so the scale may be negative.
        extreme = torch.where(-low >= high, low, high)
        scales = storable(-extreme / scheme.zero_point, scale_type)
        return scales, torch.full_like(scales, scheme.zero_point)
    scales = storable((high - low) / scheme.max_code, scale_type)
    return scales, (-low / scales).round().clamp(0, scheme.max_code)


def _codes(groups: Tensor, scales: Tensor, zeros: Tensor, max_code: int) -> Tensor:
    return (groups / scales).add_(zeros).round_().clamp_(0, max_code)


class _Best:
    """The best levels seen so far, per row and group."""

    def __init__(self, groups: Tensor, weights: Tensor, max_code: int) -> None:
        self._groups, self._weights, self._max_code = groups, weights, max_code
        self.scales, self.zeros = groups.new_ones(groups.shape[:2]), groups.new_zeros(groups.shape[:2])
        self._errors = torch.full_like(self.scales, torch.inf)
        self.low, self.high = torch.zeros_like(self.scales), torch.zeros_like(self.scales)

    def offer(self, scales: Tensor, zeros: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> None:
        """Take the levels where their error is smaller; `low` and `high` are the range they were made from."""
        codes = _codes(self._groups, scales[..., None], zeros[..., None], self._max_code)
        errors = codes.sub_(zeros[..., None]).mul_(scales[..., None]).sub_(self._groups).square_()
        errors = torch.einsum("rgi,gi->rg", errors, self._weights)
        better = errors < self._errors
        self._errors = torch.where(better, errors, self._errors)
        self.scales, self.zeros = torch.where(better, scales, self.scales), torch.where(better, zeros, self.zeros)
        if low is not None and high is not None:
            self.low, self.high = torch.where(better, low, self.low), torch.where(better, high, self.high)

    def least_squares(self) -> Tensor:
        """The scales [out, G] that fit the codes of the best levels: sum h w c / sum h c^2 with c = code - zero."""
        codes = _codes(self._groups, self.scales[..., None], self.zeros[..., None], self._max_code)
        codes.sub_(self.zeros[..., None])
        above = torch.einsum("rgi,rgi,gi->rg", self._groups, codes, self._weights)
        below = torch.einsum("rgi,rgi,gi->rg", codes, codes, self._weights)
        return torch.where(below > 0, above / below.clamp_min(1e-30), self.scales)


def _search(groups: Tensor, weights: Tensor, scheme: QuantScheme, scale_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Levels [R, G] of groups [R, G, g]: shrink both ends, move each alone, then fit scales to codes and codes to scales."""
    best = _Best(groups, weights, scheme.max_code)
    low, high = _extremes(groups)
    for step in range(SHRINKS[scheme.bits]):
        shrunk = 1 - SHRINK_STEP * step
        _offer_range(best, low * shrunk, high * shrunk, scheme, scale_type)
    for share in () if scheme.symmetric or scheme.bits == 8 else EDGE_STEPS:
        for side in (share, -share):
            width = (best.high - best.low) * side
            _offer_range(best, best.low + width, best.high, scheme, scale_type)
            _offer_range(best, best.low, best.high + width, scheme, scale_type)
    if scheme.symmetric:  # the other end of the range may as well be the one with a step more
        for step in range(SHRINKS[scheme.bits] // 2):
            best.offer(storable(-best.scales * (1 - 2 * SHRINK_STEP * step), scale_type), best.zeros)
    for _ in range(REFIT_ROUNDS):
        best.offer(storable(best.least_squares(), scale_type), best.zeros)
    return best.scales, best.zeros


def _offer_range(best: _Best, low: Tensor, high: Tensor, scheme: QuantScheme, scale_type: torch.dtype) -> None:
    low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    best.offer(*_levels(low, high, scheme, scale_type), low, high)
