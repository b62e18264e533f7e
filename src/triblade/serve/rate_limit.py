"""Requests per minute and client: a bucket of tokens each, refilled evenly.

Knows no HTTP. Holds a bounded number of buckets; the longest unused go first, and one that is full again is as good
as none.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from triblade.serve.errors import RateLimitError

MAX_CLIENTS = 10_000


class RateLimiter:
    """Allows bursts of a whole minute's requests, and the rate on average.

    Args:
        per_minute: requests per minute and client.
        clock: seconds, never going back.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (tokens, when)

    def take(self, client: str) -> None:
        """Count one request of `client`.

        Raises:
            RateLimitError: it has none left, with the seconds until it has.
        """
        now = self._clock()
        tokens, when = self._buckets.pop(client, (float(self._per_minute), now))
        tokens = min(self._per_minute, tokens + (now - when) * self._per_minute / 60)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait_s = math.ceil((1 - tokens) * 60 / self._per_minute)
            raise RateLimitError(f"more than {self._per_minute} requests per minute", retry_after_s=max(1, wait_s))
