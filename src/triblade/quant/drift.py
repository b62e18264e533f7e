"""Does the calibration text look like the traffic? One number from the tokens of both, and what stands behind it.

The score is the Jensen-Shannon divergence of the two distributions over tokens, in bits: 0 is the same, 1 is nothing in common.
Small samples differ by chance, so the score of two random halves of the calibration text is given beside it. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOTICEABLE = 0.1  # above the score that halves of one text have


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far traffic is from calibration; `unseen` is the share of traffic tokens that calibration never had."""

    score: float
    score_by_chance: float
    unseen: float

    @property
    def is_noticeable(self) -> bool:
        """Whether calibrating on other text would likely help."""
        return self.score - self.score_by_chance > NOTICEABLE

    def __str__(self) -> str:
        verdict = "calibrate on text like the traffic" if self.is_noticeable else "no cause for concern"
        return (
            f"drift {self.score:.3f} bits (by chance {self.score_by_chance:.3f}), "
            f"{self.unseen:.1%} of the traffic's tokens unseen: {verdict}"
        )


def drift(calibration: Tensor, traffic: Tensor, vocab_size: int) -> Drift:
    """Compare token ids [N] with token ids [M], both of one vocabulary."""
    seen = torch.bincount(calibration.flatten(), minlength=vocab_size).double()
    met = torch.bincount(traffic.flatten(), minlength=vocab_size).double()
    shuffled = calibration.flatten()[torch.randperm(calibration.numel(), generator=torch.Generator().manual_seed(0))]
    half = min(len(shuffled) // 2, traffic.numel())
    halves = [torch.bincount(part, minlength=vocab_size).double() for part in (shuffled[:half], shuffled[-half:])]
    return Drift(
        score=divergence(seen, met),
        score_by_chance=divergence(*halves),
        unseen=(met[seen == 0].sum() / met.sum().clamp_min(1)).item(),
    )


def divergence(first: Tensor, second: Tensor) -> float:
    """Jensen-Shannon divergence, in bits (0 to 1), of two vectors [V] of counts. Source: Lin 1991."""
    p, q = (counts / counts.sum().clamp_min(1) for counts in (first, second))
    middle = (p + q) / 2
    parts = [torch.where(x > 0, x * (x / middle.clamp_min(1e-300)).log2(), 0.0).sum() for x in (p, q)]
    return max(0.0, ((parts[0] + parts[1]) / 2).item())
