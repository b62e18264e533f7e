"""Starting and stopping a server process: ports, loading, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FakeClient
from live_server import eventually, live_server

from triblade.config import EngineConfig, ServerConfig
from triblade.errors import CheckpointError, ConfigError
from triblade.serve.run import bind, serve

SCRIPT = Path(__file__).parents[1] / "support" / "fake_server.py"


@dataclass
class Process:
    """A server in a process of its own."""

    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.popen.stderr is not None
        self.lines.extend(iter(self.popen.stderr.readline, ""))

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)

    @property
    def url(self) -> str:
        eventually(lambda: self.said("listening on"))
        found = re.search(r"http://\S+:\d+", "".join(self.lines))
        assert found
        return found.group()

    def ready(self) -> str:
        url = self.url
        eventually(lambda: self.said("serving fake at"))
        return url

    def exit_code(self) -> int:
        return self.popen.wait(10)


@contextmanager
def process(*options: str, **environment: str) -> Iterator[Process]:
    command = [sys.executable, str(SCRIPT), "0", *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, **environment}
    ) as popen:
        server = Process(popen)
        reader = threading.Thread(target=server.read)
        reader.start()
        try:
            yield server
        finally:
            popen.kill()
            reader.join()


def post(url: str, prompt: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 4000, **body}, timeout=20)


# Ports


def test_a_taken_port_is_found_before_anything_else() -> None:  # H01
    def start(config: EngineConfig) -> Any:
        raise AssertionError("the model must not be loaded")

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on port {port}") as refused:
            serve(EngineConfig(model="fake"), ServerConfig(port=port), start=start)
    assert "--port" in str(refused.value.hint)
    assert refused.value.exit_code == 2


def test_a_bound_port_is_taken_at_once() -> None:
    with bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1"])
def test_a_wrong_host(host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(host)) as refused:
        bind(ServerConfig(host=host, port=0))
    assert "--host" in str(refused.value.hint)


def test_nothing_heavy_is_imported_before_the_port_is_bound() -> None:  # H01
    code = "import sys, triblade.serve.run; print([m for m in ('torch', 'fastapi', 'uvicorn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_ipv6() -> None:
    if not socket.has_ipv6:
        return
    with bind(ServerConfig(host="::1", port=0)) as listener:
        assert listener.family is socket.AF_INET6


# Loading


def test_while_the_model_loads() -> None:
    loaded = threading.Event()
    engine = FakeClient()

    def start(config: EngineConfig) -> FakeClient:
        assert loaded.wait(10)
        return engine

    with live_server(start=start) as live:
        for path in ("/health", "/ping", "/v1/models"):
            waiting = live.get(path)
            assert waiting.status_code == 503
            assert waiting.json()["error"]["code"] == "loading"
            assert int(waiting.headers["retry-after"]) >= 1
        assert live.post("/v1/completions", {"prompt": "x"}).json()["error"]["code"] == "loading"
        assert live.get("/version").status_code == live.get("/metrics").status_code == 200
        loaded.set()
        eventually(lambda: live.get("/health").status_code == 200)
        assert live.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert engine.closed


def test_a_model_that_comes_too_late_is_closed() -> None:
    loaded = threading.Event()
    engine = FakeClient()

    def start(config: EngineConfig) -> FakeClient:
        assert loaded.wait(10)
        return engine

    with live_server(start=start) as live:
        assert live.get("/ping").status_code == 503
    loaded.set()
    eventually(lambda: engine.closed)


def test_a_model_that_does_not_load_ends_the_server() -> None:
    def start(config: EngineConfig) -> Any:
        raise CheckpointError("model.safetensors is missing")

    with pytest.raises(CheckpointError, match="missing"):
        serve(EngineConfig(model="fake"), ServerConfig(port=0), start=start)


def test_exit_code_of_a_model_that_does_not_load() -> None:
    with process("--load-fails") as server:
        assert server.exit_code() == 1
        assert server.said("error: the checkpoint is broken")


# Signals


def test_the_first_signal_drains() -> None:  # H12
    with process() as server, ThreadPoolExecutor(2) as pool:
        url = server.ready()
        with httpx.Client(base_url=url) as kept:
            assert kept.get("/ping").status_code == 200
            running = pool.submit(post, url, "short")
            streaming = pool.submit(post, url, "short", stream=True)
            eventually(lambda: 'num_requests_running{model_name="fake"} 2.0' in httpx.get(f"{url}/metrics").text)
            server.popen.send_signal(signal.SIGTERM)
            eventually(lambda: server.said("draining"))
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/ping")
        assert running.result().json()["choices"][0]["text"] == "x" * 20
        assert '"finish_reason":"stop"' in streaming.result().text
        assert server.exit_code() == 0
        eventually(lambda: server.said("engine closed"))


def test_draining_ends_in_time() -> None:  # H12, D06
    with process("--drain-s", "0.3") as server, ThreadPoolExecutor(2) as pool:
        url = server.ready()
        running = pool.submit(post, url, "long")
        streaming = pool.submit(post, url, "long", stream=True)
        eventually(lambda: 'num_requests_running{model_name="fake"} 2.0' in httpx.get(f"{url}/metrics").text)
        server.popen.send_signal(signal.SIGTERM)
        assert running.result().status_code == 503
        assert running.result().json()["error"]["code"] == "shutting_down"
        assert '"code":"shutting_down"' in streaming.result().text
        assert streaming.result().text.endswith("data: [DONE]\n\n")
        assert server.exit_code() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_at_once(second: signal.Signals) -> None:  # H12
    with process() as server, ThreadPoolExecutor(1) as pool:
        url = server.ready()
        running = pool.submit(post, url, "long")
        eventually(lambda: 'num_requests_running{model_name="fake"} 1.0' in httpx.get(f"{url}/metrics").text)
        server.popen.send_signal(signal.SIGINT)
        eventually(lambda: server.said("draining"))
        server.popen.send_signal(second)
        assert server.exit_code() == 0
        assert server.said("engine closed")
        with pytest.raises(httpx.RemoteProtocolError):
            running.result()


def test_a_signal_while_loading() -> None:
    with process("--load-s", "30") as server:
        assert httpx.get(f"{server.url}/ping").status_code == 503
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_an_unwritable_home_does_not_matter(tmp_path: Path) -> None:  # H06
    with process(HOME="/proc/nothing", XDG_CACHE_HOME="/proc/nothing", TMPDIR="/proc/nothing") as server:
        url = server.ready()
        assert post(url, "x").json()["choices"][0]["text"] == "Hello, world!"
