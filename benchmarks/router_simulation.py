"""The simulation of many replicas against real processes behind the real router, with the same arrivals.

A p99 of some hundred requests is a few requests: which of two equal replicas gets one turns on a millisecond, and with it what is
cached where and how long the tail is. So a scenario is simulated COPIES times with arrivals moved by up to JITTER_S; their mean is
compared, and their range stands beside it. Nothing is fitted: step times are those that the replicas are told, the way of a request
is the default of `triblade simulate`. Two scenarios of conversations were looked at while the model was repaired, the others not.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from router_fleet import CACHE_BLOCKS, STEP, Got, ask, fakes, routed, session, text_of

from triblade.bench.metrics import quantile
from triblade.config import RouteConfig, SimulateConfig
from triblade.config.route import Policy
from triblade.deploy.simulation import WARM_UP, Simulated, Site, simulate
from triblade.deploy.simulation_replica import Limits
from triblade.deploy.simulation_times import StepTimes
from triblade.deploy.simulation_traffic import SimulatedRequest, Traffic

TRANSFER: dict[str, float] = {"transfer_ms": 3.0, "transfer_us": 10.0}
TIMES = StepTimes(
    step_s=STEP["step_ms"] * 1e-3,
    sequence_s=STEP["decode_us"] * 1e-6,
    prompt_token_s=STEP["prefill_us"] * 1e-6,
    request_s=SimulateConfig().request_ms * 1e-3,
    transfer_s=TRANSFER["transfer_ms"] * 1e-3,
    transfer_token_s=TRANSFER["transfer_us"] * 1e-6,
)
KV_BLOCKS = 10 * CACHE_BLOCKS
LIMITS = Limits(chunk_tokens=STEP["chunk_tokens"], max_running=STEP["max_running"], kv_tokens=16 * KV_BLOCKS)
JITTER_S, COPIES = 0.004, 8


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A traffic and who serves it."""

    traffic: Traffic
    requests: int
    replicas: int = 8
    prefill: int = 0
    policy: Policy = "prefix"
    seed: int = 1

    def made(self) -> list[SimulatedRequest]:
        """The requests, as fake replicas cache them: prompts and not answers, so a prompt knows that of the turn before."""
        requests, last = self.traffic.requests(self.requests, self.seed), dict[int, int]()
        for request in requests:
            request.known_tokens = last.get(request.conversation, request.shared_tokens)
            last[request.conversation] = request.prompt_tokens
        return requests

    def simulated(self, chance: random.Random) -> Simulated:
        """By the model, with arrivals a little later."""
        requests = self.made()
        for request in requests:
            request.arrival_s += chance.uniform(0, JITTER_S)
        requests.sort(key=lambda request: request.arrival_s)
        route = RouteConfig(policy=self.policy)
        site = Site(replicas=self.replicas, prefill=self.prefill, times=TIMES, limits=LIMITS, route=route)
        return simulate(requests, site)

    def measured(self) -> list[Got]:
        """By processes."""
        with ExitStack() as stack:
            urls, _ = stack.enter_context(
                fakes(self.replicas + self.prefill, **STEP, **TRANSFER, cache_blocks=KV_BLOCKS)
            )
            url = stack.enter_context(routed(urls[self.prefill :], self.policy, urls[: self.prefill]))
            return asyncio.run(open_loop(url, self.made()))


TALK = Traffic(request_rate=20.0, prompt_tokens=1500, output_tokens=60, shared_tokens=256, turns=3, think_s=2.0)
SCENARIOS = {
    "conversations": Scenario(traffic=TALK, requests=1400),
    "conversations, fewer": Scenario(traffic=replace(TALK, request_rate=12.0), requests=840),
    "long answers": Scenario(traffic=Traffic(request_rate=14.0, prompt_tokens=200, output_tokens=200), requests=900),
    "four replicas, five turns": Scenario(
        traffic=Traffic(request_rate=10.0, prompt_tokens=700, output_tokens=80, turns=5, think_s=4.0),
        requests=680,
        replicas=4,
    ),
    "at random": Scenario(traffic=replace(TALK, request_rate=10.0), requests=680, policy="random"),
    "long prompts": Scenario(
        traffic=Traffic(request_rate=12.0, prompt_tokens=2500, output_tokens=20, spread=0.9), requests=800, replicas=6
    ),
    "3 prefill, 5 decode": Scenario(traffic=replace(TALK, request_rate=9.0), requests=900, replicas=5, prefill=3),
}


async def open_loop(url: str, requests: Sequence[SimulatedRequest]) -> list[Got]:
    """Every request at its time, whatever became of the others."""
    async with session() as http:
        begun_s = time.perf_counter()

        async def one(request: SimulatedRequest) -> Got:
            await asyncio.sleep(max(0.0, begun_s + request.arrival_s - time.perf_counter()))
            return await ask(http, url, {"prompt": text_of(request), "max_tokens": request.output_tokens}, begun_s)

        return list(await asyncio.gather(*map(one, requests)))


def compared(scenario: Scenario) -> dict[str, Any]:
    """What was measured, what was simulated, and how far they are apart."""
    got, chance = scenario.measured(), random.Random(0)
    copies = [scenario.simulated(chance) for _ in range(COPIES)]
    measured, simulated = figures_measured(got), mean_of([figures_simulated(one) for one in copies])
    if scenario.prefill:  # a decode server's answer does not tell what its prefill server had cached
        del measured["hit_rate"], simulated["hit_rate"]
    tails = sorted(1000 * one.ttft_s["p99"] for one in copies)
    return {
        "traffic": asdict(scenario.traffic),
        "site": {"replicas": scenario.replicas, "prefill": scenario.prefill, "policy": scenario.policy},
        "requests": len(got),
        "failed": sum(not one.ok for one in got),
        "busy": copies[0].busy,
        "measured": measured,
        "simulated": simulated,
        "error": {name: simulated[name] / value - 1 for name, value in measured.items() if value},
        "simulated_ttft_ms_p99_range": [tails[0], tails[-1]],
    }


def mean_of(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: statistics.fmean(one[name] for one in found) for name in found[0]}


def figures_measured(got: Sequence[Got]) -> dict[str, float]:
    """Without the warm-up, as the simulation counts."""
    counted = got[int(len(got) * WARM_UP) :]
    begin_s, end_s = counted[0].sent_s, counted[-1].sent_s
    first = sorted(one.first_s - one.sent_s for one in counted)
    each = sorted((one.end_s - one.first_s) / max(1, one.tokens - 1) for one in counted)
    return {
        "output_tokens_per_s": sum(one.tokens for one in got if begin_s <= one.end_s <= end_s) / (end_s - begin_s),
        "ttft_ms_p50": 1000 * quantile(first, 0.5),
        "ttft_ms_p90": 1000 * quantile(first, 0.9),
        "ttft_ms_p99": 1000 * quantile(first, 0.99),
        "tpot_ms_p50": 1000 * quantile(each, 0.5),
        "tpot_ms_p99": 1000 * quantile(each, 0.99),
        "hit_rate": sum(one.cached_tokens for one in counted) / sum(one.prompt_tokens for one in counted),
    }


def figures_simulated(result: Simulated) -> dict[str, float]:
    """The same of a simulation."""
    first = {f"ttft_ms_{name}": 1000 * value for name, value in result.ttft_s.items()}
    each = {f"tpot_ms_{name}": 1000 * result.tpot_s[name] for name in ("p50", "p99")}
    return {"output_tokens_per_s": result.output_tokens_per_s, **first, **each, "hit_rate": result.hit_rate}
