"""Processes and clients for the benchmarks of the router: fake replicas, the real router, streamed requests and what they got.

The replicas are processes of their own that speak HTTP as vLLM does, sleep for the time of a step and keep a prefix cache of
counted tokens (tests/support/fake_replica.py). Knows no result. Invariant: every process ends with its block.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from triblade.deploy.simulation_traffic import SimulatedRequest

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "tests" / "support" / "fake_replica.py"
STEP: dict[str, Any] = {"step_ms": 20.0, "decode_us": 300.0, "prefill_us": 60.0, "chunk_tokens": 512, "max_running": 32}
CACHE_BLOCKS = 600  # of 16 tokens: a replica holds the conversations of an eighth of the users, and not of many more
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Got:
    """What a client got of one request."""

    ok: bool
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    why: str = ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a group of its own, ended with the block."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, *words], stdout=quiet, stderr=quiet, start_new_session=True) as started:
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()


def wait_for(url: str, replicas: int = 0) -> None:
    late = time.monotonic() + PATIENCE_S
    while time.monotonic() < late:
        try:
            answer = httpx.get(f"{url}/health", timeout=5)
            if answer.status_code == 200 and (not replicas or answer.json()["replicas"] == replicas):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"{url} does not answer")


@contextmanager
def fakes(count: int, **options: float) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Fresh fake replicas: their addresses and processes."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        started = [stack.enter_context(process(str(FAKE), str(port), *words)) for port in ports]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            wait_for(url)
        yield urls, started


@contextmanager
def fleet(
    count: int, policy: str = "prefix", **options: float
) -> Iterator[tuple[str, list[str], list[subprocess.Popen[bytes]]]]:
    """A router in front of fresh fake replicas: its address, theirs, their processes."""
    with fakes(count, **options) as (urls, started), routed(urls, policy) as url:
        yield url, urls, started


@contextmanager
def routed(urls: Sequence[str], policy: str = "prefix", prefill: Sequence[str] = ()) -> Iterator[str]:
    """A router in front of servers that answer already; with `prefill` servers the others only decode."""
    port = free_port()
    apart = [*(w for url in prefill for w in ("--prefill", url)), *(w for url in urls for w in ("--decode", url))]
    words = ["-m", "triblade", "route", *(apart if prefill else urls), "--port", str(port), "--policy", policy]
    with process(*words, "--health-interval-s", "0.5", "--log-level", "error"):
        url = f"http://127.0.0.1:{port}"
        wait_for(url, len(urls))
        yield url


def text_of(request: SimulatedRequest) -> str:
    """A prompt of so many tokens that begins as earlier ones of its conversation do, and no other."""
    shared = ("system  " * request.shared_tokens)[: 4 * request.shared_tokens]
    own = f"c{request.conversation:07d}" * (request.prompt_tokens // 2 + 1)
    return (shared + own)[: 4 * request.prompt_tokens]


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any], begun_s: float) -> Got:
    """One streamed completion."""
    sent_s = time.perf_counter() - begun_s
    first_s, tokens, error = 0.0, 0, ""
    usage: dict[str, Any] = {}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                return Got(False, sent_s=sent_s, why=f"status {response.status}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    error = str(event["error"].get("code"))
                elif event["choices"]:
                    tokens += 1
                    first_s = first_s or time.perf_counter() - begun_s
                usage = event.get("usage") or usage
    except (aiohttp.ClientError, TimeoutError) as failed:
        error = type(failed).__name__
    end_s = time.perf_counter() - begun_s
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt = usage.get("prompt_tokens", 0)
    return Got(not error, tokens, prompt, cached, sent_s, first_s, end_s, error)


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))


async def users(url: str, count: int, turns: int, each: tuple[int, int]) -> list[Got]:
    """So many users, each of whom waits for an answer before the next turn, which holds all before it."""
    prompt_tokens, output_tokens = each
    begun_s = time.perf_counter()

    async def one(number: int) -> list[Got]:
        found = []
        for turn in range(1, turns + 1):
            request = SimulatedRequest(0.0, number, prompt_tokens * turn, output_tokens)
            found.append(await ask(http, url, {"prompt": text_of(request), "max_tokens": output_tokens}, begun_s))
        return found

    async with session() as http:
        return [got for some in await asyncio.gather(*map(one, range(count))) for got in some]
