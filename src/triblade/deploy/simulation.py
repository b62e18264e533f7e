"""Many simulated replicas behind the router's own choice: how long requests wait, for so many replicas and this traffic.

The replicas are chosen by `Fleet`, the code that routes real requests, so policies are compared as they are. With prefill replicas:
choose both -> compute the prompt -> send its KV -> decode. One heap of events; equal seeds give equal results.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from triblade.bench.metrics import quantile
from triblade.config import RouteConfig
from triblade.deploy.replicas import Fleet, Lease, Role
from triblade.deploy.simulation_replica import Limits, SimulatedReplica
from triblade.deploy.simulation_times import StepTimes
from triblade.deploy.simulation_traffic import SimulatedRequest

MOST_GROWTH = 0.05  # seconds that first tokens come later for each second that passes: 5 % more comes than is done
WARM_UP = 0.3  # of all requests, which begin with empty caches and no queues
PREFILL: tuple[Role, ...] = ("prefill",)
SERVE: tuple[Role, ...] = ("any", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """So many replicas of one kind; with prefill ones, `replicas` only decode.

    Attributes:
        route: policy and weights of the router.
    """

    replicas: int
    prefill: int = 0
    times: StepTimes
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    route: RouteConfig = RouteConfig()  # noqa: RUF009 - frozen

    def fleet(self) -> Fleet:
        """As the router has it, everybody up."""
        names = [f"http://{number}" for number in range(self.replicas)]
        apart = tuple(f"http://p{number}" for number in range(self.prefill))
        config = replace(self.route, prefill=apart, decode=tuple(names) if apart else ())
        fleet = Fleet(() if apart else names, config)
        for one in fleet.replicas:
            fleet.succeeded(one)
        return fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What was found, without the requests of the warm-up. Seconds, tokens per second, shares."""

    requests: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    hit_rate: float
    busy: float  # of replicas that decode, or do everything
    prefill_busy: float
    is_stable: bool  # waits do not grow with time


def simulate(requests: Sequence[SimulatedRequest], site: Site) -> Simulated:
    """Serve these requests, which are changed; there is at least one."""
    run = _Run(site)
    last_s = run.serve(requests)
    return _summary(requests, run, last_s)


@dataclass(eq=False, slots=True)
class _Serving:
    """A request's leases, and its prompt while a prefill replica computes it."""

    request: SimulatedRequest
    decode: Lease
    prefill: Lease | None = None
    part: SimulatedRequest | None = None  # what the prefill replica sees


class _Run:
    """One simulation."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._fleet = site.fleet()
        self.replicas = [
            SimulatedReplica(site.times, site.limits, only_prefill=one.role == "prefill")
            for one in self._fleet.replicas
        ]
        self.roles = [one.role for one in self._fleet.replicas]
        self._ready = {roles: self._fleet.ready(roles) for roles in (PREFILL, SERVE)}
        self._serving: dict[SimulatedRequest, _Serving] = {}
        self._events: list[
            tuple[float, int, int, SimulatedRequest | None]
        ] = []  # (time, replica, version, what arrives)

        self._pushed = 0

    def serve(self, requests: Sequence[SimulatedRequest]) -> float:
        """All of them; the time of the last event."""
        now_s, coming = 0.0, 0
        while coming < len(requests) or self._events:
            if coming < len(requests) and (not self._events or requests[coming].arrival_s <= self._events[0][0]):
                now_s = requests[coming].arrival_s
                self._arrive(requests[coming], now_s)
                coming += 1
                continue
            now_s, number, version, arriving = heapq.heappop(self._events)
            if arriving is not None:
                self._add(number, arriving, now_s)
            elif version == self.replicas[number].version:
                self._finish(number, now_s)
        return now_s

    def _arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """Choose, and send the request to where its prompt is computed."""
        prompt, travel_s = request.prompt(), self._site.times.request_s / 2
        serving = _Serving(request, self._fleet.lease(prompt, self._ready[SERVE]))
        first = serving.decode
        if self._ready[PREFILL] and not self._fleet.is_short(serving.decode.missing_bytes):
            first = serving.prefill = self._fleet.lease(prompt, self._ready[PREFILL])
            request_there = replace(request, output_tokens=1)
            serving.part = request_there
            self._serving[request_there] = serving
        self._serving[request] = serving
        self._push(now_s + travel_s, first.replica.number, serving.part or request)

    def _push(self, at_s: float, number: int, arriving: SimulatedRequest) -> None:
        self._pushed -= 1  # below every version, and no two alike
        heapq.heappush(self._events, (at_s, number, self._pushed, arriving))

    def _add(self, number: int, request: SimulatedRequest, now_s: float) -> None:
        self.replicas[number].add(request, now_s)
        self._schedule(number)

    def _schedule(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.next_s < math.inf:
            heapq.heappush(self._events, (replica.next_s, number, replica.version, None))

    def _finish(self, number: int, now_s: float) -> None:
        """A stretch of one replica is over."""
        first, done = self.replicas[number].finish()
        back_s = self._site.times.request_s / 2
        for request in first:
            serving = self._serving[request]
            if request is serving.request:
                serving.decode.begun()
                request.first_s += back_s
        for request in done:
            serving = self._serving.pop(request)
            if request is serving.part:
                self._hand_over(serving, now_s)
            else:
                request.end_s += back_s
                if serving.part is not None:  # what came from the prefill replica was no hit
                    request.cached_tokens = serving.part.cached_tokens
                serving.decode.end()
        self._schedule(number)

    def _hand_over(self, serving: _Serving, now_s: float) -> None:
        """The router hears of it, and the decode replica gets the KV that it lacks, and computes the last token."""
        assert serving.prefill is not None
        serving.prefill.end()
        request, times, number = serving.request, self._site.times, serving.decode.replica.number
        sent_tokens = self.replicas[number].receive(request)
        takes_s = times.request_s + times.transfer_s + sent_tokens * times.transfer_token_s
        self._push(now_s + takes_s, number, request)


def _summary(requests: Sequence[SimulatedRequest], run: _Run, last_s: float) -> Simulated:
    counted = requests[int(len(requests) * WARM_UP) :]
    begin_s = counted[0].arrival_s
    seconds = max(1e-9, counted[-1].arrival_s - begin_s)
    within = [request for request in requests if begin_s <= request.end_s <= counted[-1].arrival_s]
    prompt = sum(request.prompt_tokens for request in counted)
    return Simulated(
        requests=len(counted),
        requests_per_s=len(within) / seconds,
        output_tokens_per_s=sum(request.output_tokens for request in within) / seconds,
        ttft_s=_quantiles([request.ttft_s for request in counted]),
        tpot_s=_quantiles([request.tpot_s for request in counted if request.output_tokens > 1]),
        hit_rate=sum(request.cached_tokens for request in counted) / prompt,
        busy=_busy(run, last_s, SERVE),
        prefill_busy=_busy(run, last_s, PREFILL),
        is_stable=_growth(counted) <= MOST_GROWTH,
    )


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: quantile(ordered, q) if ordered else 0.0 for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def _growth(requests: Sequence[SimulatedRequest]) -> float:
    """How much longer first tokens take in the second half than in the first, by the time between the halves."""
    halves = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    first, second = (math.fsum(one.ttft_s for one in half) / max(1, len(half)) for half in halves)
    passed_s = (requests[-1].arrival_s - requests[0].arrival_s) / 2
    return (second - first) / max(passed_s, 1e-9)


def _busy(run: _Run, last_s: float, roles: Sequence[Role]) -> float:
    """Mean share of the time that these replicas computed."""
    found = [one.busy_s for one, role in zip(run.replicas, run.roles, strict=True) if role in roles]
    return sum(found) / (len(found) * max(last_s, 1e-9)) if found else 0.0
