"""What became of fetched KV rows, as counts since the start. Knows no engine and no wire."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    fetch_s: float = 0.0  # from asking to the last row, over complete transfers
    store_s: float = 0.0  # of the engine's thread, writing rows
    num_expired_leases: int = 0  # prefill workers: rows that nobody took in time
    num_fallbacks: int = 0  # prefill workers: requests sent in another codec, which theirs would have harmed
    prefill_queue_s: float = 0.0  # prefill workers: waiting time of the request begun last, the longest of all workers
    prefill_backlog_tokens: int = 0  # prefill workers: tokens that wait to be computed
    num_prefill_workers: int = 0  # that can be asked now

    def snapshot(self) -> TransferCounts:
        """A copy that stays as it is."""
        return replace(self)
