"""What became of fetched KV rows, as counts since the start. Knows no engine and no wire."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(float(1 << power) for power in range(14, 33, 2))
_SHARES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
BOUNDS: Mapping[str, tuple[float, ...]] = {  # upper ones, of the fields of `TransferCounts` that are a Spread
    "seconds": _SECONDS,
    "size_bytes": _BYTES,
    "queue_s": _SECONDS,
    "key_error": _SHARES,
    "value_error": _SHARES,
}


@dataclass(slots=True)
class Spread:
    """Observations by size; `counts[i]` lie above bound i - 1 and not above bound i, the last above all bounds."""

    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, value: float, bounds: tuple[float, ...]) -> None:
        """One more; the same bounds every time."""
        if not self.counts:
            self.counts = [0] * (len(bounds) + 1)
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class TransferCounts:
    """Of a decode worker, or of several together."""

    num_fetches: int = 0  # prompts left to a prefill worker
    num_complete: int = 0  # of these, all rows came
    num_failed: int = 0  # ended early: lost, late, damaged or refused; the rest was computed here
    num_dropped: int = 0  # not wanted any more: aborted, or their blocks were needed
    num_damaged: int = 0  # payloads that did not pass their checks
    num_declined: int = 0  # prompts long enough that were computed here: nobody there, busy, or no blocks for them
    num_tokens: int = 0  # whose rows came
    wire_bytes: int = 0  # payloads as they came
    row_bytes: int = 0  # what they are in the cache
    store_s: float = 0.0  # of the engine's thread, writing rows
    num_faults: int = 0  # ended by an error of this worker that nobody expected
    num_slow: int = 0  # complete transfers that took long because of the link
    seconds: Spread = field(default_factory=Spread)  # from asking to the last row, of complete transfers
    size_bytes: Spread = field(default_factory=Spread)  # of their payloads as they came
    queue_s: Spread = field(default_factory=Spread)  # that they waited at the prefill worker to be computed
    key_error: Spread = field(
        default_factory=Spread
    )  # of transfers with a lossy codec: squared, as a share of the keys
    value_error: Spread = field(default_factory=Spread)  # the same of values
    num_expired_leases: int = 0  # prefill workers: rows that nobody took in time
    num_prefill_faults: int = 0  # prefill workers: the same as `num_faults`
    num_fallbacks: int = 0  # prefill workers: requests sent in another codec, which theirs would have harmed
    prefill_queue_s: float = 0.0  # prefill workers: waiting time of the request begun last, the longest of all workers
    prefill_backlog_tokens: int = 0  # prefill workers: tokens that wait to be computed
    prefill_kv_usage: float = 0.0  # prefill workers: used share of the KV cache, the largest of all workers
    num_prefill_workers: int = 0  # that can be asked now

    def observe(self, name: str, value: float) -> None:
        """Add to the spread of this name."""
        spread: Spread = getattr(self, name)
        spread.add(value, BOUNDS[name])

    def snapshot(self) -> TransferCounts:
        """A copy that stays as it is."""
        return replace(self)
