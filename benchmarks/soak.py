#!/usr/bin/env python3
"""Many requests at once against a real server, some of whose clients go away: nothing may be lost, nothing may leak.

    python benchmarks/soak.py [--model smollm2-135m] [--requests 1000] [--concurrency 64] [--disconnect 0.1] [--output FILE.json]
    python benchmarks/soak.py --seconds 600 --concurrency 16 --disconnect 0.05 --workers 1:1 --connector shm [--output FILE.json]

Requests are chats and completions, streamed or not, greedy or sampled, with prompts of 5 to 200 words. A share of the clients
closes its connection at a random moment. At the end every other answer must be complete, the block pools and the memory of every
process back at their level after warming up, and the server's counters equal to what the clients counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from cpu_server import MODEL, serving
from prometheus_client.parser import text_string_to_metric_families

WORDS = (
    "the",
    "sea",
    "is",
    "green",
    "and",
    "full",
    "of",
    "small",
    "ships",
    "that",
    "carry",
    "bread",
    "42",
    "ünö",
    "世界",
)
WARM_UP = 64
SAMPLE_S = 10.0
GROWTH, ROOM_BYTES = 1.05, 32 << 20  # of a process after warming up
POOL_BLOCKS = 600  # of all workers: few, so that all of them were in use once when the warm-up ends


@dataclass
class Tally:
    """What the clients saw."""

    sent: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    left: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    faults: list[str] = field(default_factory=list)


class Memory:
    """Resident bytes of a server and its workers over time; files in memory that two of them share count in both."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self.series: dict[str, list[tuple[float, int]]] = {}
        self._start = time.monotonic()

    def sample(self) -> None:
        """Take note of all processes."""
        for process in [self._server, *self._server.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                found = (round(time.monotonic() - self._start, 1), process.memory_info().rss)
                self.series.setdefault(self._name(process), []).append(found)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def is_flat(self) -> bool:
        """Whether each process ends about where it was after warming up, on average over a quarter of the time."""
        for samples in self.series.values():
            sizes = [size for _, size in samples]
            part = max(1, len(sizes) // 4)
            if sum(sizes[-part:]) / part > sum(sizes[:part]) / part * GROWTH + ROOM_BYTES:
                return False
        return True

    def megabytes(self) -> dict[str, list[tuple[float, float]]]:
        """(seconds, MB) of each process."""
        return {name: [(at, round(size / 1e6, 1)) for at, size in found] for name, found in self.series.items()}

    def _name(self, process: psutil.Process) -> str:
        if process == self._server:
            return "server"
        role = next((word for word in process.cmdline() if word.startswith("--role=")), "--role=other")
        return role.removeprefix("--role=")


def main() -> None:
    """Start the server, run the load, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--disconnect", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, help="as long as this, however many requests")
    parser.add_argument("--workers", help="of prefill and decode, such as 1:1; default: one engine")
    parser.add_argument("--connector", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with serving(args.model, ["--max-model-len", "2048", *worker_options(args)]) as (port, server, _):
        figures = asyncio.run(soak(f"http://127.0.0.1:{port}", psutil.Process(server.pid), args))
    figures["server_exit_code"] = server.returncode
    text = json.dumps(figures, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    if not all(figures["checks"].values()) or server.returncode:
        raise SystemExit("the soak found a difference")


def worker_options(args: argparse.Namespace) -> list[str]:
    """Of a server with workers; all but the shortest prompts are theirs."""
    if args.workers is None:
        return []
    prefill, _, decode = args.workers.partition(":")
    options = ["--prefill-workers", prefill, "--decode-workers", decode, "--connector", args.connector]
    return [*options, "--remote-prefill-tokens", "16", "--num-kv-blocks", str(POOL_BLOCKS)]


def numbers_of(args: argparse.Namespace) -> Iterator[int]:
    """Numbers of requests, until there were enough or time is up."""
    end, number = time.monotonic() + (args.seconds or 0), 0
    while time.monotonic() < end if args.seconds else number < args.requests:
        yield number
        number += 1


async def soak(url: str, server: psutil.Process, args: argparse.Namespace) -> dict[str, Any]:
    """Warm up, run, wait until idle, compare."""
    limits = httpx.Limits(max_connections=args.concurrency, max_keepalive_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await load(client, iter(range(-WARM_UP, 0)), args.concurrency, 0.0, Tally())
        before = await idle_metrics(client)
        memory = Memory(server)
        watch = asyncio.create_task(memory.watch())
        tally, start = Tally(), time.monotonic()
        await load(client, numbers_of(args), args.concurrency, args.disconnect, tally)
        seconds = time.monotonic() - start
        after = await idle_metrics(client)
        watch.cancel()
        memory.sample()
    delta = {name: after[name] - before.get(name, 0) for name in after}
    aborted = delta["request_success_total/abort"]
    served = sum(delta[f"request_success_total/{reason}"] for reason in ("stop", "length"))
    checks = {
        "no fault": not tally.faults,
        "every other answer complete": sum(tally.finished.values()) + tally.left == tally.sent,
        "finished as the server counts": served >= sum(tally.finished.values()),
        "ended once each": served + aborted <= tally.sent and served + aborted >= sum(tally.finished.values()),
        "no error": delta["request_success_total/error"] == 0,
        "tokens as the server counts": delta["generation_tokens_total"] >= tally.output_tokens,
        "pool at baseline": after["kv_cache_usage_perc"] == before["kv_cache_usage_perc"] == 0,
        "nothing running": after["num_requests_running"] == after["num_requests_waiting"] == 0,
        "memory at baseline": memory.is_flat(),
    }
    if args.workers:
        checks["pools of prefill workers at baseline"] = after["prefill_kv_cache_usage_perc"] == 0
        checks["no transfer failed"] = delta["kv_transfers_total/failed"] == 0
        checks["rows were transferred"] = delta["kv_transfers_total/complete"] > 0
    return {
        "requests": tally.sent,
        "concurrency": args.concurrency,
        "clients": {**vars(tally), "finished": dict(tally.finished)},
        "server": {name: value for name, value in delta.items() if "bucket" not in name},
        "memory_mb": memory.megabytes(),
        "seconds": seconds,
        "output_tokens_per_s": tally.output_tokens / seconds,
        "checks": checks,
    }


async def load(
    client: httpx.AsyncClient, numbers: Iterator[int], concurrency: int, disconnect: float, tally: Tally
) -> None:
    """Send all requests, `concurrency` at a time."""

    async def one(number: int) -> None:
        rng = random.Random(number)
        leaves = rng.random() < disconnect
        tally.sent += 1
        try:
            await asyncio.wait_for(ask(client, rng, tally), rng.uniform(0.02, 3) if leaves else 600)
        except TimeoutError:
            if leaves:
                tally.left += 1
            else:
                tally.faults.append(f"request {number} hung")
        except Exception as error:
            tally.faults.append(f"request {number}: {error!r}")

    async def seat() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(seat() for _ in range(concurrency)))


async def ask(client: httpx.AsyncClient, rng: random.Random, tally: Tally) -> None:
    """One request; counts only a complete answer."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 200)))
    stream, chat = rng.random() < 0.5, rng.random() < 0.5
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randint(1, 48), "temperature": rng.choice([0, 0.8, 1.2])}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events = await read_stream(client, path, body)
        reasons = [
            choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]
        ]
        usage = events[-1]["usage"]
    else:
        response = await client.post(path, json=body)
        response.raise_for_status()
        answer = response.json()
        reasons, usage = [choice["finish_reason"] for choice in answer["choices"]], answer["usage"]
    if len(reasons) != 1 or not 0 < usage["completion_tokens"] <= body["max_tokens"]:
        raise ValueError(f"incomplete answer: {reasons}, {usage}")
    tally.finished[reasons[0]] += 1
    tally.prompt_tokens += usage["prompt_tokens"]
    tally.output_tokens += usage["completion_tokens"]
    tally.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def read_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream that ends as it should."""
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        data = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    if data[-1] != "[DONE]":
        raise ValueError(f"the stream ended without [DONE]: {data[-1][:200]}")
    return [json.loads(event) for event in data[:-1]]


async def idle_metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's figures once nothing runs any more, by name (and reason)."""
    for _ in range(100):
        text = (await client.get("/metrics")).text
        figures: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("triblade:"):
                    labels = ("finished_reason", "le", "route", "outcome", "role")
                    reason = next((sample.labels[label] for label in labels if label in sample.labels), None)
                    name = sample.name.removeprefix("triblade:") + (f"/{reason}" if reason else "")
                    figures[name] = figures.get(name, 0) + sample.value
        if figures["num_requests_running"] == figures["num_requests_waiting"] == 0:
            return figures
        await asyncio.sleep(0.1)
    raise SystemExit("requests are still running 10 s after the last client left")


if __name__ == "__main__":
    main()
