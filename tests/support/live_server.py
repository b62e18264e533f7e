"""The real HTTP server (uvicorn, sockets) over a fake engine, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from fake_client import FakeClient
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from triblade.config import EngineConfig, ServerConfig
from triblade.serve.lifecycle import Loader, Server
from triblade.serve.run import bind

PATIENCE_S = 10.0


@dataclass
class Live:
    """A running server."""

    url: str
    engine: FakeClient
    server: Server
    http: httpx.Client

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == f"triblade:{name}"]
        assert samples, f"no such metric: {name}"
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@contextmanager
def live_server(
    engine: FakeClient | None = None, *, start: Callable[[EngineConfig], Any] | None = None, **config: Any
) -> Iterator[Live]:
    """Serve on a free port until the block ends."""
    from triblade.serve.state import ServerState

    engine = engine or FakeClient()
    max_num_seqs, plan = config.pop("max_num_seqs", 4), config.pop("plan", None)
    server_config = replace(ServerConfig(port=0, drain_timeout_s=0.0, served_model_name=("fake",)), **config)
    state = ServerState(EngineConfig(model="fake", max_num_seqs=max_num_seqs), server_config, plan)
    with bind(server_config) as listener:
        loader = Loader(state, start or (lambda _: engine))
        server = Server(state, loader, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                if start is None:
                    eventually(lambda: state.loaded_engine is not None)
                yield Live(url, engine, server, http)
        finally:
            server.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the server does not stop"
            loader.close()


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
