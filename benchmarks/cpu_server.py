"""A server in a process of its own (for `cpu.py` and `soak.py`), and how many tokens per second it sends many clients.

The clients are as cheap as can be (sockets read until they close, counted afterwards), since they share the machine with the
server.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MODEL = "benchmarked"  # the name that the server gives its model
READY_S = 180
POLL_S = 0.02
COMPLETION_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@contextmanager
def serving(model: str, options: Sequence[str]) -> Iterator[tuple[int, subprocess.Popen[bytes], float]]:
    """A server's port, its process, which has ended after the block, and the seconds from its start until it was ready."""
    port = free_port()
    command = [sys.executable, "-m", "triblade", "serve", model, "--port", str(port), "--served-model-name", MODEL]
    start = time.perf_counter()
    server = subprocess.Popen([*command, "--log-level", "warning", *options])
    try:
        while not healthy(port):
            if server.poll() is not None or time.perf_counter() - start > READY_S:
                raise SystemExit("the server did not become ready")
            time.sleep(POLL_S)
        yield port, server, time.perf_counter() - start
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def healthy(port: int) -> bool:
    """Whether /health says 200."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=READY_S) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def throughput(port: int, rng: random.Random, load: tuple[int, int, int], *, concurrency: int, stream: bool) -> float:
    """Output tokens per second of `load` = (requests, prompt tokens, new tokens), `concurrency` at a time."""
    requests, prompt, new = load
    body = {"model": MODEL, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    prompts = ([rng.randrange(100, 40000) for _ in range(prompt)] for _ in range(requests))
    messages = [_message(json.dumps({**body, "prompt": tokens}).encode()) for tokens in prompts]
    start = time.perf_counter()
    tokens = asyncio.run(_all(port, messages, concurrency))
    seconds = time.perf_counter() - start
    if tokens != requests * new:
        raise SystemExit(f"{requests * new} tokens were asked for, {tokens} came")
    return tokens / seconds


def _message(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


async def _all(port: int, messages: list[bytes], concurrency: int) -> int:
    waiting = iter(messages)

    async def client() -> int:
        return sum([await _one(port, message) for message in waiting])

    return sum(await asyncio.gather(*(client() for _ in range(concurrency))))


async def _one(port: int, message: bytes) -> int:
    """Completion tokens of one answer, as its usage says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message)
    answer = await reader.read()
    writer.close()
    found = COMPLETION_TOKENS.findall(answer)
    if not found:
        raise SystemExit(f"no usage in the answer: {answer[:300]!r}")
    return int(found[-1])
