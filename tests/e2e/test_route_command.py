"""`triblade route` as a process in front of processes: replicas that are killed under load and come back, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

FAKE = Path(__file__).parents[1] / "support" / "fake_replica.py"
PATIENCE_S = 30.0
BODY = {"model": "fake", "prompt": "a" * 400, "max_tokens": 20, "stream": True}
SLOW = {**BODY, "max_tokens": 2000}
DONE = "data: [DONE]\n\n"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program, killed with the block if it still runs."""
    with subprocess.Popen([sys.executable, *words]) as started:
        try:
            yield started
        finally:
            started.kill()


def fake(port: int) -> list[str]:
    return [str(FAKE), str(port), "--step-ms", "10"]


def wait_for(is_so: Callable[[], bool]) -> None:
    late = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < late, "it does not come about"
        time.sleep(0.02)


def num_up(url: str) -> int:
    """Replicas that take requests."""
    try:
        return int(httpx.get(f"{url}/health", timeout=PATIENCE_S).json().get("replicas", 0))
    except httpx.ConnectError:
        return 0


@contextmanager
def routing(ports: Sequence[int], *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router in front of these replicas, which are up."""
    (port,) = free_ports(1)
    urls = [f"http://127.0.0.1:{one}" for one in ports]
    words = [
        "-m",
        "triblade",
        "route",
        *urls,
        "--port",
        str(port),
        "--log-level",
        "error",
        "--health-interval-s",
        "0.1",
    ]
    with process(*words, *options) as router:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: num_up(url) == len(ports))
        yield router, url


def test_replicas_are_killed_under_load_and_come_back() -> None:
    ports = free_ports(3)
    with ExitStack() as stack:
        replicas = [stack.enter_context(process(*fake(port))) for port in ports]
        _, url = stack.enter_context(routing(ports, "--policy", "round-robin"))

        async def user(http: httpx.AsyncClient) -> list[str]:
            return [(await http.post(f"{url}/v1/completions", json=BODY)).text for _ in range(4)]

        async def load() -> list[str]:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
                users = [asyncio.create_task(user(http)) for _ in range(9)]
                await asyncio.sleep(0.3)
                os.kill(replicas[0].pid, signal.SIGKILL)
                return [text for found in await asyncio.gather(*users) for text in found]

        answers = asyncio.run(load())
        assert all("word " in text and text.endswith(DONE) for text in answers)  # broken ones had a token before
        assert sum("replica_lost" in text for text in answers) <= 3  # what ran there: a third of the users
        wait_for(lambda: num_up(url) == 2)
        stack.enter_context(process(*fake(ports[0])))
        wait_for(lambda: num_up(url) == 3)


@pytest.mark.parametrize(("seconds", "ending"), [("600", "length"), ("0.2", "shutting down")], ids=["time", "no time"])
def test_a_router_that_is_told_to_end_lets_answers_finish(seconds: str, ending: str) -> None:
    (port,) = free_ports(1)
    body = BODY | {"max_tokens": 60} if ending == "length" else SLOW
    with process(*fake(port)), routing([port], "--drain-timeout-s", seconds) as (router, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as got:
            pieces = got.iter_text()
            text = next(pieces)
            router.send_signal(signal.SIGTERM)
            wait_for(lambda: is_refused(url))
            text += "".join(pieces)
        assert ending in text
        assert text.endswith(DONE)
        assert router.wait(PATIENCE_S) == 0


def is_refused(url: str) -> bool:
    """Whether a new client is sent away."""
    try:
        return httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE_S).status_code == 503
    except httpx.TransportError:
        return True
