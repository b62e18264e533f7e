"""The router of many replicas: what it adds, what it saves, what is lost with killed replicas, whether the simulation agrees.

The replicas are fake: processes of their own that speak HTTP as vLLM does, sleep for the time of a step and keep a prefix cache of
counted tokens (tests/support/fake_replica.py). So hit rates, failures and waiting are real, and speeds of models are not measured.
With --servers two triblade servers of a real model are routed to as well.

    python benchmarks/router.py --output benchmarks/results/router.json [--parts latency hits kill simulation servers]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
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

from triblade.bench.metrics import quantile
from triblade.config import RouteConfig
from triblade.deploy.simulation import Site, simulate
from triblade.deploy.simulation_replica import Limits
from triblade.deploy.simulation_times import StepTimes
from triblade.deploy.simulation_traffic import SimulatedRequest, Traffic
from triblade.files import written_whole

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "tests" / "support" / "fake_replica.py"
WORKERS = 8
STEP: dict[str, Any] = {"step_ms": 20.0, "decode_us": 300.0, "prefill_us": 60.0, "chunk_tokens": 512, "max_running": 32}
TIMES = StepTimes(step_s=0.020, sequence_s=300e-6, prompt_token_s=60e-6, request_s=0.006)
CACHE_BLOCKS = 600  # of 16 tokens: a replica holds the conversations of an eighth of the users, and not of many more
PARTS = ("latency", "hits", "kill", "simulation", "servers")
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
def fleet(
    count: int, policy: str = "prefix", **options: float
) -> Iterator[tuple[str, list[str], list[subprocess.Popen[bytes]]]]:
    """A router in front of fresh fake replicas: its address, theirs, their processes."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        started = [stack.enter_context(process(str(FAKE), str(port), *words)) for port in ports]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            wait_for(url)
        yield stack.enter_context(routed(urls, policy)), urls, started


@contextmanager
def routed(urls: Sequence[str], policy: str = "prefix") -> Iterator[str]:
    """A router in front of servers that answer already."""
    port = free_port()
    words = ["-m", "triblade", "route", *urls, "--port", str(port), "--policy", policy, "--health-interval-s", "0.5"]
    with process(*words, "--log-level", "error"):
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


def latency(rounds: int = 400) -> dict[str, Any]:
    """The same request direct and through the router, in turns, over kept connections; ms until the first byte and the last."""
    found: dict[str, Any] = {"rounds": rounds}
    with fleet(1) as (url, urls, _), httpx.Client(timeout=10, trust_env=False) as http:
        for kind, stream in (("whole", False), ("stream", True)):
            body = {
                "model": "fake",
                "messages": [{"role": "user", "content": "word " * 400}],
                "max_tokens": 8,
                "stream": stream,
            }
            times: dict[str, list[tuple[float, float]]] = {"direct": [], "routed": []}
            for number in range(rounds + 20):
                for name, base in (("direct", urls[0]), ("routed", url)):
                    taken = one_answer(http, f"{base}/v1/chat/completions", body)
                    if number >= 20:  # connections are made, code is warm
                        times[name].append(taken)
            for at, mark in enumerate(("first_byte", "last_byte")):
                direct, through = ([one[at] for one in times[name]] for name in ("direct", "routed"))
                added = sorted(r - d for r, d in zip(through, direct, strict=True))
                found[f"{kind}_{mark}"] = {
                    "direct_ms_p50": statistics.median(direct),
                    "routed_ms_p50": statistics.median(through),
                    "added_ms_p50": statistics.median(added),
                    "added_ms_p90": quantile(added, 0.9),
                }
    return found


def one_answer(http: httpx.Client, url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds until its first byte and its last."""
    begun, first = time.perf_counter(), 0.0
    with http.stream("POST", url, json=body) as response:
        for _ in response.iter_raw():
            first = first or time.perf_counter()
    return 1000 * (first - begun), 1000 * (time.perf_counter() - begun)


def hits() -> dict[str, Any]:
    """Prefix hits of a multi-turn workload: by prefix and by chance."""
    found: dict[str, Any] = {}
    for policy in ("prefix", "random", "least-load"):
        with fleet(WORKERS, policy, **STEP, cache_blocks=CACHE_BLOCKS) as (url, _, _):
            got = asyncio.run(users(url, count=32, turns=6, each=(200, 16)))
        first = sorted(1000 * (one.first_s - one.sent_s) for one in got)
        found[policy] = {
            "requests": len(got),
            "failed": sum(not one.ok for one in got),
            "hit_rate": sum(one.cached_tokens for one in got) / sum(one.prompt_tokens for one in got),
            "ttft_ms_mean": statistics.fmean(first),
            "ttft_ms_p99": quantile(first, 0.99),
        }
    found["prefix_against_random"] = found["prefix"]["hit_rate"] / found["random"]["hit_rate"]
    return found


def kill() -> dict[str, Any]:
    """Two of eight replicas are killed while 48 users wait for answers."""
    with fleet(WORKERS, **STEP) as (url, _, started):

        async def run() -> list[Got]:
            asked = asyncio.create_task(users(url, count=48, turns=10, each=(100, 30)))
            for victim in started[:2]:
                await asyncio.sleep(2.0)
                os.kill(victim.pid, signal.SIGKILL)
            return await asked

        got = asyncio.run(run())
        page = httpx.get(f"{url}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("triblade_router:retries_total")]
    return {
        "requests": len(got),
        "killed": 2,
        "failed_before_a_token": sum(not one.ok and not one.tokens for one in got),
        "broken_off_after_a_token": sum(not one.ok and one.tokens > 0 for one in got),
        "retries": float(lines[0].split()[-1]),
        "reasons": sorted({one.why for one in got if one.why}),
    }


async def open_loop(url: str, requests: Sequence[SimulatedRequest]) -> list[Got]:
    """Every request at its time, whatever became of the others."""
    async with session() as http:
        begun_s = time.perf_counter()

        async def one(request: SimulatedRequest) -> Got:
            await asyncio.sleep(max(0.0, begun_s + request.arrival_s - time.perf_counter()))
            return await ask(http, url, {"prompt": text_of(request), "max_tokens": request.output_tokens}, begun_s)

        return list(await asyncio.gather(*map(one, requests)))


def simulation(rates: Sequence[float] = (12.0, 20.0), seconds: float = 25.0) -> dict[str, Any]:
    """The same arrivals to eight real processes behind the real router, and to the simulation."""
    found: dict[str, Any] = {}
    for rate in rates:
        traffic = Traffic(
            request_rate=rate, prompt_tokens=1500, output_tokens=60, shared_tokens=256, turns=3, think_s=2.0
        )
        requests = as_cached_by_fakes(traffic.requests(int(rate * seconds), seed=1))
        with fleet(WORKERS, **STEP, cache_blocks=10 * CACHE_BLOCKS) as (url, _, _):
            got = asyncio.run(open_loop(url, requests))
        limits = Limits(chunk_tokens=512, max_running=32, kv_tokens=CACHE_BLOCKS * 160)
        result = simulate(requests, Site(replicas=WORKERS, times=TIMES, limits=limits, route=RouteConfig()))
        counted = got[int(len(got) * 0.3) :]
        begin_s, end_s = counted[0].sent_s, counted[-1].sent_s
        tokens = sum(one.tokens for one in got if begin_s <= one.end_s <= end_s)
        first = sorted(one.first_s - one.sent_s for one in counted)
        each = sorted((one.end_s - one.first_s) / max(1, one.tokens - 1) for one in counted)
        hit = sum(one.cached_tokens for one in counted) / sum(one.prompt_tokens for one in counted)
        measured = {
            "output_tokens_per_s": tokens / (end_s - begin_s),
            "ttft_ms_p50": 1000 * quantile(first, 0.5),
            "ttft_ms_p99": 1000 * quantile(first, 0.99),
            "tpot_ms_p50": 1000 * quantile(each, 0.5),
            "hit_rate": hit,
        }
        predicted = {
            "output_tokens_per_s": result.output_tokens_per_s,
            "ttft_ms_p50": 1000 * result.ttft_s["p50"],
            "ttft_ms_p99": 1000 * result.ttft_s["p99"],
            "tpot_ms_p50": 1000 * result.tpot_s["p50"],
            "hit_rate": result.hit_rate,
        }
        error = {name: predicted[name] / measured[name] - 1 for name in measured}
        sent = {"requests": len(got), "failed": sum(not one.ok for one in got), "busy": result.busy}
        found[f"{rate:g} requests/s"] = {**sent, "measured": measured, "simulated": predicted, "error": error}
    return found


def as_cached_by_fakes(requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
    """Fake replicas cache prompts and not their own answers: what is known of a prompt is the prompt before."""
    last: dict[int, int] = {}
    for request in requests:
        request.known_tokens = last.get(request.conversation, request.shared_tokens)
        last[request.conversation] = request.prompt_tokens
    return requests


def servers(model: str) -> dict[str, Any]:
    """Two real servers, one of which is killed under load."""
    options = ["--threads", "1", "--max-num-seqs", "8", "--num-kv-blocks", "2000", "--log-level", "error"]
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        started = [
            stack.enter_context(process("-m", "triblade", "serve", model, "--port", str(port), *options))
            for port in ports
        ]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for one in urls:
            wait_for(one)
        url = stack.enter_context(routed(urls))

        async def run() -> list[Got]:
            asked = asyncio.create_task(users(url, count=6, turns=4, each=(60, 24)))
            await asyncio.sleep(2.5)
            os.kill(started[0].pid, signal.SIGKILL)
            return await asked

        got = asyncio.run(run())
    return {
        "model": Path(model).name,
        "requests": len(got),
        "failed_before_a_token": sum(not one.ok and not one.tokens for one in got),
        "broken_off_after_a_token": sum(not one.ok and one.tokens > 0 for one in got),
        "hit_rate": sum(one.cached_tokens for one in got) / max(1, sum(one.prompt_tokens for one in got)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--model", default="smollm2-135m", help="of the real servers")
    options = parser.parse_args()
    result: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    result["machine"] = {"python": platform.python_version(), "aiohttp": aiohttp.__version__, "cores": os.cpu_count()}
    result["replicas"] = {"kind": "fake processes with set step times", "count": WORKERS, **STEP}
    work = {"latency": latency, "hits": hits, "kill": kill, "simulation": simulation}
    for part in options.parts:
        result[part] = servers(options.model) if part == "servers" else work[part]()
        print(part, json.dumps(result[part], indent=1), flush=True)
        with written_whole(options.output) as whole:
            whole.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
