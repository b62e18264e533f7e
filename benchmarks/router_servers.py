"""The router in front of two real triblade servers, one core each: prefix hits, added latency, a server killed, a server drained.

Conversations go through /v1/chat/completions, each turn with the answers before it, so the prefix caches are the engine's own. The
parts with a signal start their servers afresh; conversations of the others begin differently. Load and router use the same cores.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from router_fleet import free_port, process, routed, session, wait_for

OPTIONS = ("--threads", "1", "--max-num-seqs", "8", "--num-kv-blocks", "2000", "--log-level", "error")
USERS, TURNS, ANSWER_TOKENS = 6, 5, 16
LONGER_TOKENS, SIGNAL_S = 64, 1.5  # answers that still run when the signal comes
QUESTION = (
    "Tell me more about the {0}, and above all about what makes number {1} of its {2} parts so hard to understand. "
)
THINGS = ("engine", "river", "violin", "garden", "orbit", "market")
ROUNDS, WARM_ROUNDS = 150, 10


@dataclass
class Turn:
    """What one turn of a conversation got."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    has_begun: bool = False
    fault: str = ""


@contextmanager
def pair(model: str) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """Two servers, each on a core of its own."""
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        started = []
        for port, core in zip(ports, itertools.cycle(sorted(os.sched_getaffinity(0)))):
            one = stack.enter_context(process("-m", "triblade", "serve", model, "--port", str(port), *OPTIONS))
            os.sched_setaffinity(one.pid, {core})
            started.append(one)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            wait_for(url)
        yield urls, started


async def talk(http: aiohttp.ClientSession, url: str, who: str, number: int, answer_tokens: int) -> list[Turn]:
    """One user's conversation; it ends where an answer fails."""
    messages, found = [{"role": "system", "content": f"You answer {who}, user number {number}. " * 8}], []
    for at in range(TURNS):
        question = QUESTION.format(THINGS[number % len(THINGS)], at, 7 + number) * 2
        messages.append({"role": "user", "content": question})
        turn, text = await say(http, url, messages, answer_tokens)
        found.append(turn)
        if turn.fault:
            break
        messages.append({"role": "assistant", "content": text})
    return found


async def say(
    http: aiohttp.ClientSession, url: str, messages: Sequence[dict[str, str]], answer_tokens: int
) -> tuple[Turn, str]:
    """One streamed answer."""
    turn, text = Turn(), ""
    body = {"messages": messages, "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return Turn(fault=f"status {response.status}"), ""
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                turn.fault = str(event["error"].get("code")) if "error" in event else turn.fault
                text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                turn.has_begun = turn.has_begun or bool(text)
                usage = event.get("usage") or {}
                turn.prompt_tokens = usage.get("prompt_tokens", 0)
                turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (aiohttp.ClientError, TimeoutError) as failed:
        turn.fault = type(failed).__name__
    return turn, text


async def conversations(url: str, who: str, answer_tokens: int = ANSWER_TOKENS) -> list[Turn]:
    """All users at once."""
    async with session() as http:
        found = await asyncio.gather(*(talk(http, url, who, number, answer_tokens) for number in range(USERS)))
    return [turn for turns in found for turn in turns]


def hit_rate(turns: Sequence[Turn]) -> float:
    """Of the turns that told what was cached."""
    return sum(one.cached_tokens for one in turns) / max(1, sum(one.prompt_tokens for one in turns))


def hits(urls: Sequence[str]) -> dict[str, Any]:
    """Shares of the prompt tokens that were cached, by prefix and by chance."""
    found: dict[str, Any] = {}
    for policy in ("prefix", "random"):
        with routed(urls, policy) as url:
            begun_s = time.perf_counter()
            turns = asyncio.run(conversations(url, policy))
        found[policy] = {
            "turns": len(turns),
            "failed": sum(bool(one.fault) for one in turns),
            "hit_rate": hit_rate(turns),
            "seconds": time.perf_counter() - begun_s,
        }
    found["prefix_against_random"] = found["prefix"]["hit_rate"] / found["random"]["hit_rate"]
    return found


def latency(urls: Sequence[str]) -> dict[str, Any]:
    """The same one-token answer of one server direct and through a router, in turns; milliseconds to the last byte."""
    body = {"messages": [{"role": "user", "content": "Say yes. " * 60}], "max_tokens": 1, "temperature": 0}
    taken: dict[str, list[float]] = {"direct": [], "routed": []}
    with routed(urls[:1]) as url, httpx.Client(timeout=30, trust_env=False) as http:
        for number in range(ROUNDS + WARM_ROUNDS):
            for name, base in (("direct", urls[0]), ("routed", url)):
                begun_s = time.perf_counter()
                http.post(f"{base}/v1/chat/completions", json=body).raise_for_status()
                if number >= WARM_ROUNDS:
                    taken[name].append(1000 * (time.perf_counter() - begun_s))
    added = [r - d for r, d in zip(taken["routed"], taken["direct"], strict=True)]
    medians = {f"{name}_ms_p50": statistics.median(values) for name, values in taken.items()}
    return {"rounds": ROUNDS, **medians, "added_ms_p50": statistics.median(added)}


def lost(model: str, number: signal.Signals) -> dict[str, Any]:
    """One of two servers gets a signal while conversations run."""
    with pair(model) as (urls, started), routed(urls) as url:

        async def run() -> list[Turn]:
            asked = asyncio.create_task(conversations(url, number.name, LONGER_TOKENS))
            await asyncio.sleep(SIGNAL_S)
            assert not asked.done(), "the load was over before the signal"
            os.kill(started[0].pid, number)
            return await asked

        turns = asyncio.run(run())
        page = httpx.get(f"{url}/metrics").text
    retries = next(line for line in page.splitlines() if line.startswith("triblade_router:retries_total"))
    return {
        "turns": len(turns),
        "failed_before_a_token": sum(bool(one.fault) and not one.has_begun for one in turns),
        "broken_off_after_a_token": sum(bool(one.fault) and one.has_begun for one in turns),
        "retries": float(retries.split()[-1]),
        "reasons": sorted({one.fault for one in turns if one.fault}),
    }


def servers(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All parts, one after the other."""
    yield "setting", {"model": Path(model).name, "options": " ".join(OPTIONS), "users": USERS, "turns": TURNS}
    with pair(model) as (urls, _):
        yield "latency", latency(urls)
        yield "hits", hits(urls)
    yield "killed", lost(model, signal.SIGKILL)
    yield "drained", lost(model, signal.SIGTERM)
