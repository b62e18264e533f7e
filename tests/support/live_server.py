"""The real HTTP server (uvicorn, sockets) over a fake engine, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from fake_engine import FakeEngine
from openai import OpenAI

from triblade.config import EngineConfig, ServerConfig
from triblade.serve.lifecycle import Loader, Server
from triblade.serve.run import bind

PATIENCE_S = 10.0


@dataclass
class Live:
    """A running server."""

    url: str
    engine: FakeEngine
    server: Server

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_S, **options)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def live_server(
    engine: FakeEngine | None = None, *, start: Callable[[EngineConfig], Any] | None = None, **config: Any
) -> Iterator[Live]:
    """Serve on a free port until the block ends."""
    from triblade.serve.state import ServerState

    engine = engine or FakeEngine()
    max_num_seqs = config.pop("max_num_seqs", 4)
    server_config = replace(ServerConfig(port=0, drain_timeout_s=0.0, served_model_name=("fake",)), **config)
    state = ServerState(EngineConfig(model="fake", max_num_seqs=max_num_seqs), server_config)
    with bind(server_config) as listener:
        loader = Loader(state, start or (lambda _: engine))
        server = Server(state, loader, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        live = Live(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, server)
        try:
            if start is None:
                eventually(lambda: state.loaded_engine is not None)
            yield live
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


def in_loop(work: Any) -> Any:
    """Run one coroutine."""
    return asyncio.run(work)
