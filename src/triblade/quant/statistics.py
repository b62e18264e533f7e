"""What calibration learns about the inputs of one product: second moments, and how far they drifted from the original's.

Everything is a mean over tokens, summed in float32 whatever the batches, so that each token counts the same. Inputs come in pairs:
those the quantized model makes, which its weights will meet, and those of the original for the same tokens. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triblade.errors import NumericalError


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStatistics:
    """Moments of the inputs x [T, in] of a product; o are the original's inputs, r what the residual stream lacks."""

    hessian: Tensor  # [in, in] float32, mean of x^T x
    magnitude: Tensor  # [in] mean of |x|
    mean: Tensor  # [in]
    peak: Tensor  # [in] largest |x|
    tokens: int
    drift: Tensor | None = None  # [in, in] mean of (o - x)^T x
    mean_drift: Tensor | None = None  # [in] mean of o - x
    residual: Tensor | None = None  # [C, in] mean of r^T x; only where the product is added to the residual stream

    def divided(self, scales: Tensor) -> InputStatistics:
        """The statistics of x / scales, for scales [in]."""
        return replace(
            self,
            hessian=self.hessian / scales[:, None] / scales,
            magnitude=self.magnitude / scales,
            mean=self.mean / scales,
            peak=self.peak / scales,
            drift=None if self.drift is None else self.drift / scales[:, None] / scales,
            mean_drift=None if self.mean_drift is None else self.mean_drift / scales,
            residual=None if self.residual is None else self.residual / scales,
        )


class Accumulator:
    """Sums inputs as they come, in batches of any size.

    Args:
        name: of the product, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._peak = torch.zeros(1)

    def add(self, x: Tensor, original: Tensor | None = None, residual: Tensor | None = None) -> None:
        """Take in x [T, in], and for the same tokens the original's inputs [T, in] and the residual's lack [T, C].

        The second moment is summed in float32. What drifted is a small difference: its products are made in the type of the
        model and only their sums are float32.
        """
        whole = x.float()
        self._tokens += len(x)
        self._sum("hessian", second_moment(whole))
        sizes = whole.abs()
        self._sum("magnitude", sizes.sum(0))
        self._peak = torch.maximum(self._peak.to(x.device), sizes.amax(0))
        self._sum("mean", whole.sum(0))
        if original is not None:
            drift = original - x
            self._sum("drift", (drift.T @ x).float())
            self._sum("mean_drift", drift.float().sum(0))
        if residual is not None:
            self._sum("residual", (residual.to(x.dtype).T @ x).float())

    def _sum(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name].add_(value) if name in self._sums else value

    def result(self) -> InputStatistics:
        """The means.

        Raises:
            NumericalError: an input was not finite; the message names the product.
        """
        means = {name: value / self._tokens for name, value in self._sums.items()}
        if not torch.isfinite(means["hessian"]).all():
            raise NumericalError(
                f"{self._name}: its inputs are not finite on the calibration text",
                hint="compute in another type: --dtype bfloat16 or float32",
            )
        return InputStatistics(tokens=self._tokens, peak=self._peak, **means)


def second_moment(x: Tensor) -> Tensor:
    """x^T x of [T, in], computing only one of the two halves that mirror each other."""
    half = x.shape[1] // 2
    left, right = x[:, :half], x[:, half:]
    corner = left.T @ right
    return torch.cat((torch.cat((left.T @ left, corner), 1), torch.cat((corner.T, right.T @ right), 1)))
