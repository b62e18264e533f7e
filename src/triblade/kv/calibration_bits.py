"""Which component gets how many bits: the least total error within a budget.

Where each further bit of a component gains less than the one before, taking the most gain per bit first is the optimum that dynamic
programming finds; a component of which that is not true (its second bit gains more than its first) gets those bits together.
Knows numbers only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Errors = npt.NDArray[np.float64]


def allocate(errors: Errors, budget: int) -> npt.NDArray[np.uint8]:
    """Bits [R] of components whose errors with 0 .. B bits are [R, B + 1], `budget` bits in all at most.

    The total error is that of the exact optimum (a knapsack, by dynamic programming over bits), up to the gain of the one purchase
    that no longer fits.
    """
    gain, step = _purchases(errors)
    order = np.argsort(-gain, axis=None, kind="stable")
    row, cost = order // gain.shape[1], step.reshape(-1)[order]
    worth = gain.reshape(-1)[order] > 0
    row, cost = row[worth], cost[worth]
    paid = np.cumsum(cost)
    bought = int(np.searchsorted(paid, budget, side="right"))
    bits = np.zeros(len(errors), dtype=np.int64)
    np.add.at(bits, row[:bought], cost[:bought])
    return bits.astype(np.uint8)


def _purchases(errors: Errors) -> tuple[Errors, npt.NDArray[np.int64]]:
    """Of every component its purchases in order: gain per bit [R, B], never rising, and bits [R, B]; unused places gain nothing.

    The corners of the lower convex hull of its errors, found for all components at once: from each corner to the one that gains
    most per bit.
    """
    rows, most = errors.shape[0], errors.shape[1] - 1
    gain, step = np.zeros((rows, most)), np.zeros((rows, most), dtype=np.int64)
    at, every = np.zeros(rows, dtype=np.int64), np.arange(rows)
    for number in range(most):
        distance = np.arange(most + 1) - at[:, None]
        rate = (errors[every, at][:, None] - errors) / np.maximum(distance, 1)
        rate = np.where(distance > 0, rate, -np.inf)
        target = rate.argmax(1)
        best = rate[every, target]
        goes_on = best > 0
        gain[goes_on, number] = best[goes_on]
        step[goes_on, number] = (target - at)[goes_on]
        at = np.where(goes_on, target, most)
    return gain, step
