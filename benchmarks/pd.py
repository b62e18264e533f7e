#!/usr/bin/env python3
"""Streams while long prompts arrive: one engine against a prefill and a decode worker, in processes of their own or in one.

    python benchmarks/pd.py [--model smollm2-135m] [--seconds 25] [--streams 4] [--prompt 1500] [--every 3] [--output FILE.json]

A closed loop of clients streams answers to short prompts; beside it a long prompt arrives every so many seconds, whatever is still
running. Reported for each way of serving: the time between the tokens of the streams (p50, p99, largest), time to the first token
of the long prompts, tokens per second, and the memory of all processes of the server (PSS: what several share counts once) before
the load and after it. The clients share the cores with the server, in all ways alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from cpu_server import MODEL, serving

from triblade import host

WAYS = {
    "colocated, chunks of 512": ("--max-num-batched-tokens", "512"),
    "colocated, chunks of 128": ("--max-num-batched-tokens", "128"),
    "prefill + decode worker": ("--prefill-workers", "1", "--decode-workers", "1"),
    "both in one process": ("--prefill-workers", "1", "--decode-workers", "1", "--pd-isolation", "thread"),
}
SHORT_TOKENS, STREAM_TOKENS, LONG_NEW_TOKENS = 16, 200, 4
WARM_UP_S = 3.0


@dataclass
class Tally:
    """What the clients saw after the warm-up."""

    gaps_s: list[float] = field(default_factory=list)  # between tokens of a stream
    first_s: list[float] = field(default_factory=list)  # of the long prompts
    stream_tokens: int = 0
    prompt_tokens: int = 0
    faults: int = 0
    begin_s: float = 0.0

    def is_on(self) -> bool:
        return time.perf_counter() >= self.begin_s


async def request(port: int, tokens: Sequence[int], new: int) -> list[float]:
    """When each event of a streamed completion came."""
    body = {
        "model": MODEL,
        "prompt": list(tokens),
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return times


async def stream(port: int, rng: random.Random, tally: Tally, until_s: float) -> None:
    while time.perf_counter() < until_s:
        prompt = [rng.randrange(100, 40000) for _ in range(SHORT_TOKENS)]
        times = await request(port, prompt, STREAM_TOKENS)
        tally.faults += not times
        counted = [at for at in times if tally.begin_s <= at <= until_s]
        tally.stream_tokens += len(counted)
        tally.gaps_s += [after - before for before, after in pairwise(counted)]


async def long_prompt(port: int, tokens: list[int], tally: Tally) -> None:
    start = time.perf_counter()
    times = await request(port, tokens, LONG_NEW_TOKENS)
    tally.faults += not times
    if tally.is_on() and times:
        tally.first_s.append(times[0] - start)
        tally.prompt_tokens += len(tokens)


async def drive(port: int, options: argparse.Namespace) -> Tally:
    rng = random.Random(7)
    start = time.perf_counter()
    tally = Tally(begin_s=start + WARM_UP_S)
    until_s = tally.begin_s + options.seconds
    tasks = [asyncio.create_task(stream(port, rng, tally, until_s)) for _ in range(options.streams)]
    due = start + 0.5
    while due < until_s:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tokens = [rng.randrange(100, 40000) for _ in range(options.prompt)]
        tasks.append(asyncio.create_task(long_prompt(port, tokens, tally)))
        due += options.every
    await asyncio.gather(*tasks)
    return tally


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "itl_p50_ms": round(1e3 * median(tally.gaps_s), 2),
        "itl_p99_ms": round(1e3 * percentile(tally.gaps_s, 0.99), 2),
        "itl_max_ms": round(1e3 * max(tally.gaps_s), 2),
        "long_ttft_p50_s": round(median(tally.first_s), 3),
        "stream_tokens_per_s": round(tally.stream_tokens / seconds, 1),
        "all_tokens_per_s": round((tally.stream_tokens + tally.prompt_tokens) / seconds, 1),
        "long_prompts": len(tally.first_s),
        "faults": tally.faults,
    }


def pss_mib(server: int) -> int:
    """Of a process and its children."""
    process = psutil.Process(server)
    return round(sum(each.memory_full_info().pss for each in (process, *process.children(recursive=True))) / 2**20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between long prompts")
    parser.add_argument("--way", action="append", choices=sorted(WAYS), help="only these")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {}
    for way in options.way or WAYS:
        flags = ("--max-model-len", "2048", "--num-kv-blocks", "1200", *WAYS[way])
        with serving(options.model, flags) as (port, server, _):
            idle = pss_mib(server.pid)
            results[way] = summary(asyncio.run(drive(port, options)), options.seconds)
            results[way] |= {"idle_pss_mib": idle, "pss_mib": pss_mib(server.pid)}
        print(f"{way:28} {json.dumps(results[way])}", flush=True)
    load = {name: getattr(options, name) for name in ("seconds", "streams", "prompt", "every")}
    load["model"] = Path(options.model).name
    report = {"load": load, "cores": host.usable_cores(), "processor": platform.processor(), "results": results}
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(any(result["faults"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
