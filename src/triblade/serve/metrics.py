"""Prometheus metrics of one server, under vLLM's names with our prefix where the meaning is the same.

Counters and histograms are fed by the requests this server answers, so they agree with the `usage` that clients got;
gauges are read from the engine when somebody scrapes. Every server has a registry of its own. A metric never breaks
serving: a negative amount counts nothing, a negative reading shows as 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from triblade.engine.client import EngineLoad
from triblade.engine.outputs import FinishReason
from triblade.serve.drift import Finding, PlanWatch
from triblade.serve.transfer_metrics import transfer_metrics
from triblade.spec.record import SpeculationCounts

logger = logging.getLogger(__name__)

PREFIX = "triblade:"
LABELS = ("model_name",)
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})  # others share one label value

SECONDS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.15,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)

COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "Prompt tokens of started requests, once per prompt whatever n.",
    "generation_tokens": "Tokens generated, aborted requests included.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache, once per prompt.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache: the sum of usage's cached_tokens.",
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token, per prompt.", SECONDS),
    "inter_token_latency_seconds": ("Between tokens of a choice; tokens of one step share its time.", GAPS_S),
    "e2e_request_latency_seconds": ("From arrival to the end of a complete answer, per request.", SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step computed, per prompt.", SECONDS),
    "request_prompt_tokens": ("Tokens per prompt.", TOKENS),
    "request_generation_tokens": ("Tokens per ended choice.", TOKENS),
}
GAUGES: Mapping[str, tuple[str, Callable[[EngineLoad], float]]] = {
    "num_requests_running": ("Sequences being computed; a request has n per prompt.", lambda load: load.num_running),
    "num_requests_waiting": ("Sequences that wait to be computed.", lambda load: load.num_waiting),
    "kv_cache_usage_perc": (
        "Used share of the KV cache, 0 to 1; blocks kept only for reuse are free.",
        lambda load: 1 - load.num_free_kv_blocks / load.num_kv_blocks if load.num_kv_blocks else 0.0,
    ),
    "num_kv_blocks": ("Blocks of the KV cache.", lambda load: load.num_kv_blocks),
}


DRAFTS: Mapping[str, tuple[str, Callable[[SpeculationCounts], int]]] = {
    "num_steps": ("Steps that gave a sequence tokens, one of its own each.", lambda counts: counts.num_steps),
    "num_drafts": ("Of these, steps that verified a draft.", lambda counts: counts.num_drafts),
    "num_draft_tokens": ("Tokens drafted and verified.", lambda counts: counts.num_draft_tokens),
    "num_accepted_tokens": (
        "Tokens generated beside the steps' own: together with num_steps all of them.",
        lambda counts: counts.num_accepted_tokens,
    ),
}
DRAFTS_PER_POSITION: Mapping[str, tuple[str, Callable[[SpeculationCounts], list[int]]]] = {
    "num_draft_tokens_per_pos": ("The same by position in a draft.", lambda counts: counts.drafted_per_position),
    "num_accepted_tokens_per_pos": ("The same by position in a draft.", lambda counts: counts.accepted_per_position),
}


PLAN: tuple[tuple[str, str, Callable[[Finding], float]], ...] = (
    ("plan_assumed", "What the plan assumes or predicts.", lambda finding: finding.assumed),
    ("plan_seen", "The same over the last complete window of requests.", lambda finding: finding.seen),
    ("plan_drift", "1 where the two differ so much that another plan may be better.", lambda finding: finding.drifted),
)


class ServerMetrics:
    """The metrics of one server.

    Args:
        model: value of the label `model_name`.
        load: reads the engine; None while there is no engine.
        watch: is told everything that is counted and observed.
    """

    def __init__(self, model: str, load: Callable[[], EngineLoad | None], watch: PlanWatch | None = None) -> None:
        registry = self._registry = CollectorRegistry()
        self._model = model
        self._watch = watch
        self._counters = {
            name: Counter(PREFIX + name, text, LABELS, registry=registry).labels(model)
            for name, text in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=registry).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._ended = Counter(
            f"{PREFIX}request_success", "Choices ended, by reason.", (*LABELS, "finished_reason"), registry=registry
        )
        for reason in FinishReason:
            self._ended.labels(model, reason.value)  # so that each series exists from the start
        self._http = Counter(
            f"{PREFIX}http_requests", "HTTP requests answered.", ("method", "route", "status"), registry=registry
        )
        registry.register(_EngineReadings(model, load))
        if watch is not None:
            registry.register(_PlanReadings(model, watch))
        ProcessCollector(registry=registry)

    def count(self, name: str, amount: float) -> None:
        """Add to one of `COUNTERS`."""
        if amount > 0:
            self._counters[name].inc(amount)
            self._tell(name, amount)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to one of `HISTOGRAMS`."""
        self._histograms[name].observe(max(0.0, value))
        self._tell(name, max(0.0, value))

    def ended(self, reason: FinishReason, num_tokens: int) -> None:
        """A choice ended after so many tokens."""
        self._ended.labels(self._model, reason.value).inc()
        self.observe("request_generation_tokens", num_tokens)

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.labels(method if method in METHODS else "other", route, str(status)).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text for a scraper that accepts these media types, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def _tell(self, name: str, value: float) -> None:
        if self._watch is not None:
            self._watch.note(name, value)


class _PlanReadings(Collector):
    """The last window against the plan."""

    def __init__(self, model: str, watch: PlanWatch) -> None:
        self._model = model
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """What the plan assumed, what was seen, and whether they differ too much."""
        for name, text, value in PLAN:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, "quantity"))
            for finding in self._watch.findings:
                gauge.add_metric((self._model, finding.name), value(finding))
            yield gauge


class _EngineReadings(Collector):
    """Reads the engine at scrape time; everything is 0 while there is none."""

    def __init__(self, model: str, load: Callable[[], EngineLoad | None]) -> None:
        self._model = model
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """The gauges, and the preemption counter."""
        load = self._read()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            gauge.add_metric((self._model,), max(0.0, value(load)))
            yield gauge
        text = "Sequences pushed back for lack of KV blocks."
        preemptions = CounterMetricFamily(f"{PREFIX}num_preemptions", text, labels=LABELS)
        preemptions.add_metric((self._model,), max(0, load.num_preemptions))
        yield preemptions
        yield from self._drafts(load.speculation)
        yield from transfer_metrics(PREFIX, LABELS, (self._model,), load)

    def _drafts(self, counts: SpeculationCounts) -> Iterator[Metric]:
        """Counters of speculative decoding."""
        for name, (text, value) in DRAFTS.items():
            counter = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=LABELS)
            counter.add_metric((self._model,), max(0, value(counts)))
            yield counter
        for name, (text, values) in DRAFTS_PER_POSITION.items():
            counter = CounterMetricFamily(f"{PREFIX}spec_decode_{name}", text, labels=(*LABELS, "position"))
            for position, number in enumerate(values(counts)):
                counter.add_metric((self._model, str(position)), max(0, number))
            yield counter

    def _read(self) -> EngineLoad:
        try:
            return self._load() or EngineLoad()
        except Exception:
            logger.exception("the engine's load cannot be read")
            return EngineLoad()
