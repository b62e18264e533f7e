"""The fewest replicas that serve a traffic well: search over counts, each judged by a simulation.

Counts that do everything are searched by doubling and halving. With prefill apart, the work of a prompt and of an answer say how
many of each kind there are at the least; from there one of the stage that is too slow is added, in growing steps, and taken away
again as far as that goes. Invariant: what is returned was simulated and is good enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from triblade.config import SimulateConfig
from triblade.deploy.simulation import Simulated, Site, simulate
from triblade.deploy.simulation_traffic import Traffic

LEAST_REQUESTS, MOST_REQUESTS, REQUESTS_EACH = 4000, 40_000, 20
GROWTH = 1.15  # of a stage that is too slow, from step to step
MOST_BUSY = 0.9  # nothing is served well above


@dataclass(frozen=True, slots=True)
class Sized:
    """Counts, and what they give."""

    prefill: int
    replicas: int
    result: Simulated

    @property
    def total(self) -> int:
        return self.prefill + self.replicas


@dataclass(frozen=True, slots=True)
class Question:
    """A traffic, replicas of one kind, and when they are good enough.

    Attributes:
        site: its counts are of no importance.
    """

    traffic: Traffic
    site: Site
    config: SimulateConfig

    def simulated(self, replicas: int, prefill: int = 0) -> Sized:
        """What so many give."""
        count = self.config.requests or min(MOST_REQUESTS, max(LEAST_REQUESTS, REQUESTS_EACH * (replicas + prefill)))
        requests = self.traffic.requests(count, self.config.seed)
        return Sized(prefill, replicas, simulate(requests, replace(self.site, replicas=replicas, prefill=prefill)))

    def is_good(self, result: Simulated) -> bool:
        """Whether enough requests are quick enough, and the queues do not grow."""
        return result.is_stable and self.is_first_good(result) and self.is_next_good(result)

    def is_first_good(self, result: Simulated) -> bool:
        """First tokens."""
        return result.ttft_s[f"p{self.config.percentile}"] * 1e3 <= self.config.ttft_ms

    def is_next_good(self, result: Simulated) -> bool:
        """Further tokens."""
        return result.tpot_s[f"p{self.config.percentile}"] * 1e3 <= self.config.tpot_ms

    @property
    def prompt_work_s(self) -> float:
        """Seconds of prefill for a second of traffic, without any hit."""
        return self.traffic.request_rate * self.traffic.prompt_tokens * self.site.times.prompt_token_s


def fewest(question: Question) -> Sized | None:
    """Replicas that do everything; None: not even `max_replicas` are enough."""
    most = question.config.max_replicas
    low, high, found = 0, min(most, max(1, math.ceil(question.prompt_work_s))), None
    while found is None:
        tried = question.simulated(high)
        if question.is_good(tried.result):
            found = tried
        elif high == most:
            return None
        else:
            low, high = high, min(most, 2 * high)
    return _least(question.simulated, question, low, found)


def fewest_apart(question: Question) -> Sized | None:
    """Prefill replicas and others that decode; None: not even `max_replicas` are enough."""
    most = question.config.max_replicas
    prefill, decode = max(1, math.ceil(question.prompt_work_s / MOST_BUSY)), 1
    tried = question.simulated(decode, prefill)
    while not question.is_good(tried.result):
        if prefill + decode >= most:
            return None
        slow_decode = not question.is_next_good(tried.result) or tried.result.busy > tried.result.prefill_busy
        if slow_decode:
            decode = max(decode + 1, math.ceil(decode * (2 if decode < prefill / 8 else GROWTH)))
        else:
            prefill = max(prefill + 1, math.ceil(prefill * GROWTH))
        tried = question.simulated(decode, prefill)
    tried = _least(lambda count: question.simulated(count, prefill), question, 0, tried)
    return _least(lambda count: question.simulated(tried.replicas, count), question, 0, tried, of_prefill=True)


def _least(
    simulated: Callable[[int], Sized], question: Question, low: int, good: Sized, *, of_prefill: bool = False
) -> Sized:
    """Halve the distance between a count that is too few and one that is good."""
    high = good.prefill if of_prefill else good.replicas
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        tried = simulated(middle)
        if question.is_good(tried.result):
            good, high = tried, middle
        else:
            low = middle
    return good
