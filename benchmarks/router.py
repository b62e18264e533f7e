"""The router of many replicas: what it adds, what it saves, what is lost with killed replicas, whether the simulation agrees.

Most replicas are fake (router_fleet.py): hit rates, failures and waiting are real, and speeds of models are not measured. The part
`servers` starts two triblade servers of a real model. Parts that are run are put into the output, others there stay as they are.

    python benchmarks/router.py --output benchmarks/results/router.json [--parts latency hits kill simulation servers]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from router_fleet import CACHE_BLOCKS, STEP, Got, fleet, users
from router_servers import servers
from router_simulation import SCENARIOS, compared

from triblade.bench.metrics import quantile
from triblade.files import written_whole

WORKERS = 8
PARTS = ("latency", "hits", "kill", "simulation", "servers")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--model", default="smollm2-135m", help="of the real servers")
    parser.add_argument("--scenarios", nargs="*", choices=SCENARIOS, default=list(SCENARIOS), help="of the simulation")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the processes end with their blocks
    result: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    result["machine"] = {"python": platform.python_version(), "aiohttp": aiohttp.__version__, "cores": os.cpu_count()}
    result["replicas"] = {"kind": "fake processes with set step times", "count": WORKERS, **STEP}
    for part in options.parts:
        for name, found in figures(part, options):
            if name:
                result.setdefault(part, {})[name] = found
            else:
                result[part] = found
            keep(options.output, result, f"{part} {name}", found)


def figures(part: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results of one part, by name where there are several."""
    if part == "simulation":
        yield from ((name, compared(SCENARIOS[name])) for name in options.scenarios)
    elif part == "servers":
        yield from servers(options.model)
    else:
        yield "", {"latency": latency, "hits": hits, "kill": kill}[part]()


def keep(output: Path, result: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    """Write all there is, and print what is new."""
    print(name, json.dumps(found, indent=1), flush=True)
    with written_whole(output) as whole:
        whole.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
