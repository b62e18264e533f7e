"""A router over sockets, in a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from live_server import PATIENCE_S, eventually
from prometheus_client.parser import text_string_to_metric_families

from triblade.config import RouteConfig, ServerConfig
from triblade.deploy.replicas_run import RouterServer
from triblade.serve.run import bind

QUICK = RouteConfig(
    port=0, health_interval_s=0.1, health_timeout_s=0.5, wait_s=0.3, drain_timeout_s=0.0, admin_key="admin"
)


@dataclass
class Routed:
    """A running router."""

    url: str
    server: RouterServer
    http: httpx.Client

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [one for family in families for one in family.samples if one.name == f"triblade_router:{name}"]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@contextmanager
def router(*urls: str, **options: Any) -> Iterator[Routed]:
    """Route to these until the block ends."""
    config = replace(QUICK, **options)
    with bind(ServerConfig(port=0)) as listener:
        server = RouterServer(urls, config, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                eventually(lambda: all(one.is_up or one.num_failures for one in server.fleet.replicas))
                yield Routed(url, server, http)
        finally:
            server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the router does not stop"
