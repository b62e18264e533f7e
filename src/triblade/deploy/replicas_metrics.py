"""Prometheus metrics of a router: what went where, what failed, how warm the chosen caches are believed to be.

Counters are fed by the requests that pass; gauges are read from the fleet when somebody scrapes. Every router has a registry of its
own. Knows no HTTP but the numbers of statuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from triblade.deploy.replicas import Fleet, Lease, Replica
from triblade.serve.metrics import METHODS, SECONDS

PREFIX = "triblade_router:"
GAUGES: Mapping[str, tuple[str, Callable[[Replica], float]]] = {
    "replica_up": ("1 where the replica takes requests.", lambda replica: replica.is_ready),
    "replica_draining": ("1 where it was told to finish what it has.", lambda replica: replica.is_draining),
    "replica_requests_running": ("Requests that it has from this router.", lambda replica: replica.num_running),
    "replica_work_bytes": ("Prompt bytes that wait there, and what running answers weigh.", lambda r: r.work_bytes),
}


class RouterMetrics:
    """The metrics of one router."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        self._http = counter("http_requests", "HTTP requests answered.", "method", "route", "status")
        self._routed = counter("requests", "Requests given to a replica, retries included.", "replica")
        self._retries = counter("retries", "Requests given to one more replica before the client got a token.")
        self._failures = counter("replica_failures", "Requests that a replica broke off.", "replica")
        self._ejections = counter("replica_ejections", "Times that a replica was taken out.", "replica")
        self._left = counter("clients_left", "Requests whose client left before the end.")
        self._prompt_bytes = counter("prompt_bytes", "Bytes of routed prompts.")
        self._warm_bytes = counter("prompt_warm_bytes", "Of these, bytes that the chosen replica is believed to have.")
        self._hand_overs = counter("prefills", "Prompts for decode servers, by who computed them.", "by")
        self._first_byte = Histogram(
            f"{PREFIX}time_to_first_byte_seconds",
            "From arrival to the first byte for the client.",
            buckets=SECONDS,
            registry=registry,
        )
        ProcessCollector(registry=registry)

    def watch(self, fleet: Fleet) -> None:
        """Show the state of these replicas."""
        self._registry.register(_Replicas(fleet))

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered."""
        self._http.labels(method if method in METHODS else "other", route, str(status)).inc()

    def routed(self, lease: Lease, attempt: int) -> None:
        """A request was given to a replica, at the first attempt or a later one."""
        self._routed.labels(lease.replica.url).inc()
        self._prompt_bytes.inc(lease.prompt.size_bytes)
        self._warm_bytes.inc(lease.prompt.size_bytes - lease.missing_bytes)
        if attempt > 1:
            self._retries.inc()

    def failed(self, replica: Replica) -> None:
        """A replica broke a request off."""
        self._failures.labels(replica.url).inc()

    def ejected(self, replica: Replica) -> None:
        """A replica was taken out."""
        self._ejections.labels(replica.url).inc()

    def left(self) -> None:
        """A client left."""
        self._left.inc()

    def handed_over(self, *, has_transfer: bool) -> None:
        """A decode server got a request, with the KV of its prompt or without."""
        self._hand_overs.labels("prefill" if has_transfer else "decode").inc()

    def first_byte(self, seconds: float) -> None:
        """The client gets its first byte."""
        self._first_byte.observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text for a scraper that accepts these media types, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type


class _Replicas(Collector):
    """Reads the fleet at scrape time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("replica", "role"))
            for replica in self._fleet.replicas:
                gauge.add_metric((replica.url, replica.role), float(value(replica)))
            yield gauge
