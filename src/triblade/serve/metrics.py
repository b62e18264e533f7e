"""Prometheus metrics of one server, under vLLM's names with our prefix where the meaning is the same.

Counters and histograms are fed by the requests this server answers, so they agree with the `usage` that clients got; gauges
are read from the engine when somebody scrapes. Every server has a registry of its own. A metric never breaks serving:
negative amounts are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from triblade.engine.client import EngineLoad
from triblade.engine.outputs import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

PREFIX = "triblade:"
LABEL = "model_name"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})  # others share one label value

# Gauge name -> help, value. A negative reading shows as 0.
GAUGES: dict[str, tuple[str, Callable[[EngineLoad], float]]] = {
    "num_requests_running": ("Sequences being computed now (a request has n of them).", lambda load: load.num_running),
    "num_requests_waiting": ("Sequences that wait to be computed.", lambda load: load.num_waiting),
    "kv_cache_usage_perc": ("Used share of the KV cache, 0 to 1; blocks kept only for reuse are free.", lambda load: kv_usage(load)),
    "num_kv_blocks": ("Blocks of the KV cache.", lambda load: load.num_kv_blocks),
}


class ServerMetrics:
    """The metrics of one server.

    Args:
        model: value of the label `model_name`.
        load: reads the engine; None while there is no engine.
    """

    def __init__(self, model: str, load: Callable[[], EngineLoad | None]) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests; once per prompt whatever n.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated, aborted requests included.")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache, once per prompt.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found there: the sum of usage's cached_tokens.")
        self._endings = self._finish_counter()
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token, per prompt.", SECONDS)
        self.gap = self._histogram("inter_token_latency_seconds", "Between tokens of a choice; a step's time is shared by its tokens.", GAPS_S)
        self.total = self._histogram("e2e_request_latency_seconds", "Arrival to the end of the answer, per request.", SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to the first computed step, per prompt.", SECONDS)
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens per prompt.", TOKENS)
        self.answer_length = self._histogram("request_generation_tokens", "Tokens per finished choice.", TOKENS)
        self._http = Counter(
            f"{PREFIX}http_requests", "HTTP requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self._registry.register(_EngineGauges(model, load))
        ProcessCollector(registry=self._registry)

    def finished(self, reason: FinishReason, num_tokens: int) -> None:
        """A choice ended."""
        self._endings.labels(self._model, reason.value).inc()
        self.answer_length.observe(max(0, num_tokens))

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.labels(method if method in METHODS else "other", route, str(status)).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text for a scraper that accepts these media types, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, (LABEL,), registry=self._registry).labels(self._model)

    def _finish_counter(self) -> Counter:
        labels = (LABEL, "finished_reason")
        counter = Counter(f"{PREFIX}request_success", "Choices ended, by reason.", labels, registry=self._registry)
        for reason in FinishReason:
            counter.labels(self._model, reason.value)  # so that each series exists from the start
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"{PREFIX}{name}", text, (LABEL,), buckets=buckets, registry=self._registry)
        return histogram.labels(self._model)


def kv_usage(load: EngineLoad) -> float:
    """Used share of the KV cache."""
    return 1 - load.num_free_kv_blocks / load.num_kv_blocks if load.num_kv_blocks else 0.0


def increase(counter: Counter, amount: float) -> None:
    """Count `amount`; a negative one is our mistake, not the client's, and counts nothing."""
    if amount > 0:
        counter.inc(amount)


class RequestRecorder:
    """Turns the outputs of one request into metrics.

    Invariant: what it adds to the token counters equals the request's usage.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._begun: set[int] = set()  # prompts that gave something
        self._last: dict[tuple[int, int], float] = {}  # (prompt, choice) -> time of its last token
        self._counts: dict[tuple[int, int], int] = {}  # tokens of the choices that have not ended
        self._timed: set[int] = set()  # prompts whose first token is out

    def note(self, prompt: int, output: RequestOutput) -> None:
        """One output of prompt number `prompt`."""
        if output.index == 0 and prompt not in self._begun:
            self._begun.add(prompt)
            self._begin(output)
        choice = (prompt, output.index)
        self._counts[choice] = self._counts.get(choice, 0) + len(output.token_ids)
        if output.token_ids:
            self._tokens(prompt, choice, len(output.token_ids))
        if output.finish_reason is not None:
            self._metrics.finished(output.finish_reason, self._counts.pop(choice))

    def end(self, leftover: FinishReason | None) -> None:
        """The request is over; choices that did not finish ended for `leftover`."""
        self._metrics.total.observe(time.perf_counter() - self._arrival)
        for count in self._counts.values():
            self._metrics.finished(leftover or FinishReason.ERROR, count)
        self._counts.clear()

    def _begin(self, output: RequestOutput) -> None:
        metrics = self._metrics
        for counter in (metrics.prompt_tokens, metrics.cache_queries):
            increase(counter, output.num_prompt_tokens)
        increase(metrics.cache_hits, output.num_cached_tokens)
        metrics.prompt_length.observe(max(0, output.num_prompt_tokens))
        if output.queue_time_s is not None:
            metrics.queue_time.observe(max(0.0, output.queue_time_s))

    def _tokens(self, prompt: int, choice: tuple[int, int], count: int) -> None:
        now = time.perf_counter()
        increase(self._metrics.generation_tokens, count)
        if prompt not in self._timed:
            self._timed.add(prompt)
            self._metrics.first_token.observe(now - self._arrival)
        if choice in self._last:
            gap = (now - self._last[choice]) / count
            for _ in range(count):
                self._metrics.gap.observe(gap)
        self._last[choice] = now


class _EngineGauges(Collector):
    """Reads the engine at scrape time."""

    def __init__(self, model: str, load: Callable[[], EngineLoad | None]) -> None:
        self._model = model
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """The gauges, and the preemption counter; all 0 without an engine."""
        load = self._read()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=(LABEL,))
            gauge.add_metric((self._model,), max(0.0, value(load)))
            yield gauge
        preemptions = CounterMetricFamily(f"{PREFIX}num_preemptions", "Sequences pushed back for lack of KV blocks.", labels=(LABEL,))
        preemptions.add_metric((self._model,), max(0, load.num_preemptions))
        yield preemptions

    def _read(self) -> EngineLoad:
        try:
            return self._load() or EngineLoad()
        except Exception:
            logger.exception("the engine's load cannot be read")
            return EngineLoad()
