"""Prometheus metrics of prefill and decode in different workers. They exist only where there are prefill workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from triblade.engine.client import EngineLoad
from triblade.engine.transfers import BOUNDS, Spread, TransferCounts

COUNTERS: Mapping[str, tuple[str, Callable[[TransferCounts], float]]] = {
    "kv_transfer_tokens": ("Tokens whose KV rows came from prefill workers.", lambda c: c.num_tokens),
    "kv_transfer_wire_bytes": ("Bytes of these rows as they came.", lambda c: c.wire_bytes),
    "kv_transfer_row_bytes": ("Bytes of these rows in the KV cache.", lambda c: c.row_bytes),
    "kv_transfer_seconds": ("From asking to the last row, over complete transfers.", lambda c: c.seconds.total),
    "kv_transfer_store_seconds": ("Of the decode workers' engines, storing rows.", lambda c: c.store_s),
    "kv_transfer_damaged": ("Rows that did not pass their checks and were not stored.", lambda c: c.num_damaged),
    "kv_transfer_faults": (
        "Transfers that an internal error of a worker ended; its log says which.",
        lambda c: c.num_faults + c.num_prefill_faults,
    ),
    "kv_transfer_fallbacks": (
        "Requests sent in another codec, or not at all, because that of the workers would have harmed them.",
        lambda c: c.num_fallbacks,
    ),
    "kv_transfer_slow": ("Complete transfers that took long because of the link.", lambda c: c.num_slow),
    "kv_leases_expired": ("Transfers whose rows were not taken in time.", lambda c: c.num_expired_leases),
    "prefill_declined": (
        "Prompts long enough for a prefill worker that decode workers computed: nobody there, busy, a slow link, or no blocks.",
        lambda c: c.num_declined,
    ),
}
OUTCOMES: Mapping[str, Callable[[TransferCounts], int]] = {
    "complete": lambda c: c.num_complete,
    "failed": lambda c: c.num_failed,  # lost, late or damaged: the rest was computed by the decode worker
    "dropped": lambda c: c.num_dropped,  # the request left, or its blocks were needed
}
GAUGES: Mapping[str, tuple[str, Callable[[TransferCounts], float]]] = {
    "prefill_workers": ("Prefill workers that can be asked.", lambda c: c.num_prefill_workers),
    "prefill_backlog_tokens": ("Tokens that wait at prefill workers.", lambda c: c.prefill_backlog_tokens),
    "prefill_kv_cache_usage_perc": (
        "Used share of prefill workers' KV caches, 0 to 1, the largest.",
        lambda c: c.prefill_kv_usage,
    ),
    "prefill_queue_seconds": (
        "Waiting time of prompts begun at prefill workers, the longest.",
        lambda c: c.prefill_queue_s,
    ),
    "kv_transfer_ratio": (
        "Bytes of rows in the KV cache to those on the wire, since the start.",
        lambda c: c.row_bytes / c.wire_bytes if c.wire_bytes else 1.0,
    ),
}
HISTOGRAMS: Mapping[str, tuple[str, str]] = {  # -> text, field of TransferCounts
    "kv_transfer_time_seconds": ("From asking to the last row, per complete transfer.", "seconds"),
    "kv_transfer_size_bytes": ("Bytes of the rows as they came, per complete transfer.", "size_bytes"),
    "prefill_queue_time_seconds": (
        "From arrival at a prefill worker to the first step, per complete transfer.",
        "queue_s",
    ),
    "kv_transfer_key_error": (
        "Squared error of keys that a lossy codec made, as a share of the keys, per transfer with samples.",
        "key_error",
    ),
    "kv_transfer_value_error": ("The same of values.", "value_error"),
}


def transfer_metrics(prefix: str, labels: Sequence[str], values: Sequence[str], load: EngineLoad) -> Iterator[Metric]:
    """The metrics of a load; none without prefill workers."""
    counts = load.transfers
    if counts is None:
        return
    for name, (text, value) in COUNTERS.items():
        counter = CounterMetricFamily(prefix + name, text, labels=labels)
        counter.add_metric(values, max(0.0, value(counts)))
        yield counter
    for name, (text, value) in GAUGES.items():
        gauge = GaugeMetricFamily(prefix + name, text, labels=labels)
        gauge.add_metric(values, max(0.0, value(counts)))
        yield gauge
    for name, (text, field) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(prefix + name, text, labels=labels)
        spread: Spread = getattr(counts, field)
        histogram.add_metric(values, _buckets(BOUNDS[field], spread), spread.total)
        yield histogram
    ended = CounterMetricFamily(f"{prefix}kv_transfers", "Transfers ended, by outcome.", labels=(*labels, "outcome"))
    for outcome, number in OUTCOMES.items():
        ended.add_metric((*values, outcome), number(counts))
    yield ended
    where = CounterMetricFamily(f"{prefix}prefill_tokens", "Prompt tokens computed, by role.", labels=(*labels, "role"))
    where.add_metric((*values, "prefill"), counts.num_tokens)
    where.add_metric((*values, "decode"), load.num_computed_prompt_tokens)
    yield where


def _buckets(bounds: Sequence[float], spread: Spread) -> list[tuple[str, float]]:
    """Upper bounds with the number of observations that are not above them."""
    names = [*map(str, bounds), "+Inf"]
    return list(zip(names, accumulate(spread.counts or [0] * len(names)), strict=True))
