"""When conversations begin in an open loop: seconds after the start, never falling. Pure; the same seed gives the same times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator


def arrival_times(gap: Callable[[float], float], rate: Callable[[int], float]) -> Iterator[float]:
    """Times without end.

    Args:
        gap: seconds to the next arrival at a rate.
        rate: arrivals per second when so many have come.
    """
    now = 0.0
    for number in itertools.count():
        yield now
        now += gap(rate(number))


def poisson(seed: int) -> Callable[[float], float]:
    """Gaps of a Poisson process: exponential, with mean 1 / rate."""
    return random.Random(f"arrivals/{seed}").expovariate


def fixed(rate: float) -> float:
    """Equal gaps."""
    return 1 / rate


def ramp(start: float, end: float, count: int) -> Callable[[int], float]:
    """A rate that goes evenly from `start` to `end` while `count` conversations begin."""

    def rate(number: int) -> float:
        return start + (end - start) * min(1.0, number / max(1, count - 1))

    return rate
