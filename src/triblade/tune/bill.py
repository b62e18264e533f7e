"""What serving costs, from a price that the user gives. Pure arithmetic; knows no price of its own.

A month has 730 hours. Machines are rented whole and sized for the mean rate at most; peaks are the user's to add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triblade.config import PlanConfig, Workload
from triblade.tune.serving import Outcome

HOURS_PER_MONTH = 730
SECONDS_PER_HOUR = 3600
LOAD = 0.7  # of its capacity that a machine is planned for


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Money; `before` is without the three techniques. None: not asked for, or nothing to compare with."""

    currency: str
    per_million_tokens: float  # output tokens, at full load
    per_million_tokens_before: float | None
    monthly: float | None = None
    monthly_before: float | None = None
    break_even_months: float | None = None


def bill(config: PlanConfig, workload: Workload, after: Outcome, before: Outcome | None) -> Bill | None:
    """The bill of a plan; None without a price."""
    if config.price_per_hour is None:
        return None
    rate, price = config.requests_per_month, config.price_per_hour
    monthly = None if rate is None else monthly_bill(rate, after.capacity_requests_per_s, price)
    earlier = None if rate is None or before is None else monthly_bill(rate, before.capacity_requests_per_s, price)
    return Bill(
        currency=config.currency,
        per_million_tokens=per_million_tokens(price, after.capacity_requests_per_s * workload.output_tokens),
        per_million_tokens_before=None
        if before is None
        else per_million_tokens(price, before.capacity_requests_per_s * workload.output_tokens),
        monthly=monthly,
        monthly_before=earlier,
        break_even_months=break_even_months(config.one_time_cost, earlier, monthly),
    )


def per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Money for a million tokens at this rate."""
    return price_per_hour / SECONDS_PER_HOUR / tokens_per_s * 1e6


def monthly_bill(requests_per_month: float, capacity_requests_per_s: float, price_per_hour: float) -> float:
    """Money a month for as many whole machines as the mean rate needs."""
    rate = requests_per_month / (HOURS_PER_MONTH * SECONDS_PER_HOUR)
    return machines(rate, capacity_requests_per_s) * price_per_hour * HOURS_PER_MONTH


def machines(requests_per_s: float, capacity_requests_per_s: float) -> int:
    """Machines, or groups of devices, for a rate."""
    return max(1, math.ceil(requests_per_s / (capacity_requests_per_s * LOAD)))


def break_even_months(one_time_cost: float, before: float | None, after: float | None) -> float | None:
    """Months until what was saved is what it cost; None: never, or nothing to compare."""
    if before is None or after is None or before <= after:
        return None
    return one_time_cost / (before - after)
