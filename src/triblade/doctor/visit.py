"""A visit to a running server: some seconds of requests that show what `symptoms` judges.

In order: a request alone, several at once, a prompt of nearly the full length while another answer streams, one that is too long,
text drawn at length, rounds of equal requests, and a text to score if one is given. Knows no symptom.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import httpx

from triblade import host
from triblade.bench.cores import Cores
from triblade.doctor.server import CONNECT_TIMEOUT_S, Answer, Server
from triblade.doctor.symptoms import LongPrompt, Visit
from triblade.quant.repetition import repetition_rate

AT_ONCE = 8
ANSWER_TOKENS, DRAWN_TOKENS = 64, 200
DRAWN_TEXTS = 4
ROUNDS, ROUND_REQUESTS = 5, 16
ROUNDS_S = 20.0  # a cache that is larger than what this fills is not judged
LOOK_S = 0.1  # between two looks at the gauges
REST_S = 3.0  # for requests to end after the last answer
SAMPLE = "The harbour town had three streets, and in each of them somebody claimed to have seen the ship first."
BEGINNINGS = ("Once upon a time", "The first rule of the kitchen is", "In the year 1850", "To repair a bicycle, you")
HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


async def visit(
    url: str,
    *,
    api_key: str | None = None,
    text: str = "",
    expected_perplexity: float | None = None,
    timeout_s: float = 120.0,
) -> Visit:
    """Look at the server at `url`; `text` is scored if the server scores prompts.

    Raises:
        ConfigError: no OpenAI server answers there, or none that completes text.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as http:
        server = Server(url, http)
        await server.connect()
        found = Visit(model=server.model, max_model_len=server.max_model_len, planned=await server.planned())
        before = await server.readings()
        await _alone(server, found)
        await _many(server, found, is_here=urlsplit(url).hostname in HERE)
        await _long(server, found)
        await _drawn(server, found)
        await _rounds(server, found)
        await _idle(server, found)
        found.growth = _growth(before, await server.readings())
        if text:
            found.perplexity, found.expected_perplexity = await _perplexity(server, text), expected_perplexity
        return found


async def _alone(server: Server, found: Visit) -> None:
    await server.begin(SAMPLE)  # what is made at the first request is no figure of the others
    answer = await server.complete(SAMPLE, ANSWER_TOKENS, temperature=0, ignore_eos=True)
    found.first_s, found.gaps_s = answer.first_s, answer.gaps_s


async def _many(server: Server, found: Visit, *, is_here: bool) -> None:
    """Several requests at once, while the gauges are watched."""
    before, cores = await server.readings(), Cores()
    readings = await _watched(server, asyncio.gather(*(_ask(server, number) for number in range(AT_ONCE))))
    after = await server.readings()
    found.asked_at_once = AT_ONCE
    found.most_running, found.most_waiting, found.most_kv_usage = (
        max((one.get(name, 0.0) for one in readings), default=0.0)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )
    server_s = after.get("process_cpu_seconds_total", 0.0) - before.get("process_cpu_seconds_total", 0.0)
    if (
        is_here and server_s > 0 and "prefill_workers" not in after
    ):  # the processor time of workers is not in the readings
        found.cores = host.usable_cores()
        found.busy_cores = server_s / cores.seconds
        found.foreign_cores = cores.others(found.busy_cores + cores.own)
        found.busy_share = found.busy_cores / found.cores


async def _ask(server: Server, number: int) -> Answer:
    return await server.complete(f"{number}. {SAMPLE}", ANSWER_TOKENS, temperature=0, ignore_eos=True)


async def _watched(server: Server, work: asyncio.Future[list[Answer]]) -> list[Mapping[str, float]]:
    readings = []
    while not work.done():
        readings.append(await server.readings())
        await asyncio.wait({work}, timeout=LOOK_S)
    await work
    return readings


async def _long(server: Server, found: Visit) -> None:
    """Nearly as many tokens as the server takes, while another answer streams; then more than it takes."""
    word = await server.tokenize(SAMPLE)
    if found.max_model_len is None or not word:
        return
    length = max(1, found.max_model_len - ANSWER_TOKENS)
    prompt = (word * math.ceil((found.max_model_len + 1) / len(word)))[: found.max_model_len + 1]
    streamed = Answer()
    beside = asyncio.ensure_future(
        server.complete(SAMPLE, ANSWER_TOKENS, into=streamed, temperature=0, ignore_eos=True)
    )
    while streamed.first_s is None and not beside.done():
        await asyncio.sleep(LOOK_S / 10)
    answer = await server.complete(prompt[:length], 1)
    await beside
    lives = not answer.error or not (await server.complete(SAMPLE, 1)).error
    found.long = LongPrompt(tokens=length, error=answer.error, lives=lives, gaps_s=streamed.gaps_s)
    if lives:
        found.too_long_status = await server.status(prompt)


async def _drawn(server: Server, found: Visit) -> None:
    asked = (server.complete(start, DRAWN_TOKENS, temperature=0.8, seed=1) for start in BEGINNINGS)
    texts = [answer.text.split() for answer in await asyncio.gather(*asked) if not answer.error]
    numbers: dict[str, int] = {}
    ids = [[numbers.setdefault(word, len(numbers)) for word in words] for words in texts]
    found.repetition = repetition_rate(ids) if any(ids) else None


async def _rounds(server: Server, found: Visit) -> None:
    """Equal work again and again, and the memory after each time.

    The system gives memory when it is touched, so a KV cache grows until every block was used; each request takes one at least.
    """
    readings, late = await server.readings(), time.monotonic() + ROUNDS_S
    if "num_kv_blocks" not in readings:
        return
    to_fill = math.ceil(readings["num_kv_blocks"] / ROUND_REQUESTS)
    memory = list[float]()
    while len(memory) < to_fill + ROUNDS and time.monotonic() < late:
        await asyncio.gather(*(server.complete(f"{number}. {SAMPLE}", 4) for number in range(ROUND_REQUESTS)))
        memory.append((await server.readings()).get("process_resident_memory_bytes", 0.0))
    found.memory_bytes = memory[to_fill:] if all(memory) else ()


async def _idle(server: Server, found: Visit) -> None:
    """What is held when nobody asks."""
    late = time.monotonic() + REST_S
    readings = await server.readings()
    while readings.get("num_requests_running") and time.monotonic() < late:
        await asyncio.sleep(LOOK_S)
        readings = await server.readings()
    found.idle_running, found.idle_kv_usage = readings.get("num_requests_running"), readings.get("kv_cache_usage_perc")


async def _perplexity(server: Server, text: str) -> float | None:
    scores = await server.logprobs(text)
    return math.exp(-sum(scores) / len(scores)) if scores else None


def _growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items() if name.endswith("_total")}
