"""From the cost of steps to latencies and throughput of a candidate under a workload. Pure; means only, no simulation.

Closed loop: users wait for their answers. One device takes turns between prompts and steps, so everybody's prompts delay
everybody's tokens; with workers of their own they do not, and the slower stage sets the pace. Open loop: the requests in flight
follow from the rate by Little's law; a rate that is never caught up with has no answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from triblade.config import Workload
from triblade.tune.cost import StepCost, Weights
from triblade.tune.hardware import Hardware, Kernels
from triblade.tune.rules import acceptance

Placement = Literal[
    "together", "one", "two"
]  # prefill and decode in one engine, in two on one device, on devices of their own
ITERATIONS = 40
MOST_WAITING = 0.95
SHARED_DEVICE_COST = 1.03  # two processes taking turns on one GPU; a guess, not measured
SLICED_STEPS = 2.0  # that a step takes beside a prompt on the same GPU, by time slices; a guess, not measured
CORES_OF_BANDWIDTH = (
    0.6  # exponent: half of the cores read two thirds of the bandwidth (docs/log.md: 20 to 27 of 34 to 42 GB/s)
)
HOST_LINK_SHARE = 0.25  # of the memory's bandwidth, for rows between two processes of a host
WIRE_BYTES = {"raw": 1.0, "int8": 0.51}  # of a bfloat16 row; benchmarks/results/kv-codecs.json
WIRE_BYTES_PER_S = 0.6e9  # that a core encodes and decodes with int8; the same file


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One combination of the three techniques."""

    weights: Weights
    kv_dtype: str = "bfloat16"
    drafter: str | None = None
    draft_length: int = 0
    placement: Placement = "together"
    split: str = "30:70"  # memory of prefill to decode, where they share a device
    prefill_devices: int = 0
    tensor_parallel: int = 1
    chunk: int | None = None  # tokens of a step, where they are fewer than usual for the sake of streams

    def __str__(self) -> str:
        """In few words, for tables."""
        drafts = f"{self.drafter} k {self.draft_length}" if self.drafter else "no drafts"
        where = {
            "together": f"one engine in steps of {self.chunk} tokens" if self.chunk else "one engine",
            "one": f"P/D {self.split} on one device",
            "two": f"P/D on {self.prefill_devices} + other devices",
        }[self.placement]
        parallel = f", tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{self.weights.scheme}, KV {self.kv_dtype}, {drafts}, {where}{parallel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a candidate is to run: devices, their kernels, tokens of a step."""

    hardware: Hardware
    kernels: Kernels
    devices: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Predicted means; seconds and tokens."""

    ttft_s: float
    tpot_s: float
    e2el_s: float
    output_tokens_per_s: float  # of all devices
    requests_per_s: float
    capacity_requests_per_s: float  # at most, with as many requests in flight as fit
    pause_s: float  # of a stream, at most, while a prompt of somebody else is computed
    tokens_per_step: float
    in_flight: float


def expected_tokens(candidate: Candidate, workload: Workload) -> tuple[float, float, float]:
    """Tokens that a step gives, rows that it computes for them, and what drafting costs in plain steps; per sequence.

    With acceptance a per position, a draft of k gives a + a^2 + ... + a^k tokens beside the step's own.
    """
    if candidate.drafter is None:
        return 1.0, 1.0, 0.0
    figures = acceptance(candidate.drafter)
    length, right = min(candidate.draft_length, figures.longest), figures.right(workload)
    gained = sum(right**position for position in range(1, length + 1))
    cost = figures.fixed_cost + figures.guess_cost * length
    return 1 + figures.share * gained, 1 + figures.share * length, cost


def predict(
    candidate: Candidate, cost: StepCost, site: Site, workload: Workload, most_in_flight: float
) -> Outcome | float:
    """What users will see; a number, where the rate is too much: the requests per second that it can do at most.

    Args:
        candidate: the combination.
        cost: of its steps on one whole device.
        site: where it runs.
        workload: what is asked for.
        most_in_flight: requests whose KV fits, on all devices together.
    """
    load = _Load(candidate, cost, site, workload, most_in_flight)
    # The engine drafts nothing where that is fastest, so that drafts never lower what it can do at most.
    plain = replace(load, candidate=replace(candidate, drafter=None, draft_length=0))
    full = max(one.closed(most_in_flight).requests_per_s for one in (load, plain))
    if workload.request_rate is None:
        return replace(load.closed(workload.concurrency), capacity_requests_per_s=full)
    if workload.request_rate >= full * MOST_WAITING:
        return full * MOST_WAITING
    users = workload.request_rate * load.closed(1).e2el_s
    for _ in range(ITERATIONS):
        users = (users + workload.request_rate * load.closed(max(users, 1e-3)).e2el_s) / 2
    return replace(load.closed(users), requests_per_s=workload.request_rate, capacity_requests_per_s=full)


@dataclass(frozen=True, slots=True)
class _Load:
    """One candidate with everything that its predictions need."""

    candidate: Candidate
    cost: StepCost
    site: Site
    workload: Workload
    most_in_flight: float

    def closed(self, users: float) -> Outcome:
        """Means with so many users; those whose KV does not fit wait, and their wait is part of the first token's."""
        running = min(users, self.most_in_flight)
        ttft_s, e2el_s = self._together(running) if self.candidate.placement != "two" else self._apart(running)
        cycle_s = e2el_s * users / running
        tokens = self.workload.output_tokens
        return Outcome(
            ttft_s=ttft_s + cycle_s - e2el_s,
            tpot_s=(e2el_s - ttft_s) / max(1, tokens - 1),
            e2el_s=cycle_s,
            output_tokens_per_s=users * tokens / cycle_s,
            requests_per_s=users / cycle_s,
            capacity_requests_per_s=users / cycle_s,
            pause_s=self._pause_s(running),
            tokens_per_step=expected_tokens(self.candidate, self.workload)[0],
            in_flight=users,
        )

    def _together(self, users: float) -> tuple[float, float]:
        """TTFT and whole time where prompts and steps take turns on a device, in one process or two."""
        if self._has_own_cores:
            return self._apart(users)
        each = max(1.0, users / (self.site.devices / self.candidate.tensor_parallel))
        prompt_s, decode_s = self._prompt_s(self.cost), self._decode_s(self.cost, each)
        shared = SHARED_DEVICE_COST if self.candidate.placement == "one" else 1.0
        e2el_s = (each * prompt_s + decode_s) * shared
        others = (each - 1) * prompt_s / e2el_s
        first_s = prompt_s / (1 - min(others, MOST_WAITING)) + decode_s / max(1, self.workload.output_tokens - 1)
        return min(first_s * shared + self._transfer_s(), e2el_s), e2el_s

    def _apart(self, users: float) -> tuple[float, float]:
        """The same where prompts have devices, or cores, of their own: two stages side by side."""
        prefill, decode, servers, streams = self._stages()
        prompt_s = self._prompt_s(prefill)
        moved_s = self._transfer_s()
        e2el_s = prompt_s + moved_s + self._decode_s(decode, max(1.0, users / streams))
        for _ in range(ITERATIONS):
            busy = min(users * prompt_s / servers / e2el_s, MOST_WAITING)
            waiting_s = busy / (1 - busy) * prompt_s / 2 * (users - 1) / users if users > 1 else 0.0
            first_s = waiting_s + prompt_s + moved_s
            share = max(0.05, 1 - first_s / e2el_s)
            decode_s = self._decode_s(decode, max(1.0, users * share / streams))
            e2el_s = max(first_s + decode_s, users * prompt_s / servers)
        return e2el_s - decode_s + decode_s / max(1, self.workload.output_tokens - 1), e2el_s

    def _pause_s(self, users: float) -> float:
        """Between two tokens of a stream: a step, and beside it in one engine as many tokens of others' prompts as it takes."""
        if self.candidate.placement == "two" or self._has_own_cores:
            _, decode, _, streams = self._stages()
            return self._step_s(decode, max(1.0, users / streams))
        each = max(1.0, users / (self.site.devices / self.candidate.tensor_parallel))
        step_s = self._step_s(self.cost, each)
        if each == 1:
            return step_s
        if self.candidate.placement == "one":
            return SLICED_STEPS * step_s
        cached = self.workload.prompt_tokens * self.workload.prefix_share
        others = (each - 1) * (self.workload.prompt_tokens - cached)
        return step_s + self.cost.prefill_s(max(1.0, min(self.site.chunk, others)), cached, self.site.chunk)

    @property
    def _has_own_cores(self) -> bool:
        """Two workers on a host without accelerator."""
        return self.candidate.placement == "one" and self.site.hardware.kind == "cpu"

    def _stages(self) -> tuple[StepCost, StepCost, float, float]:
        """Costs of both stages, and how many of each there are."""
        if self.candidate.placement == "two":
            apart = self.candidate.prefill_devices
            return self.cost, self.cost, apart, self.site.devices - apart
        half = replace(self.cost, hardware=_part(self.site.hardware, 0.5))
        return half, half, 1, 1

    def _prompt_s(self, cost: StepCost) -> float:
        cached = self.workload.prompt_tokens * self.workload.prefix_share
        return cost.prefill_s(max(1.0, self.workload.prompt_tokens - cached), cached, self.site.chunk)

    def _decode_s(self, cost: StepCost, sequences: float) -> float:
        """All tokens of an answer but the first."""
        tokens, _, _ = expected_tokens(self.candidate, self.workload)
        return self._step_s(cost, sequences) * max(0, self.workload.output_tokens - 1) / tokens

    def _step_s(self, cost: StepCost, sequences: float) -> float:
        """A step of streams, with what drafting for it takes."""
        _, rows, drafting = expected_tokens(self.candidate, self.workload)
        context = self.workload.prompt_tokens + self.workload.output_tokens / 2
        step_s = cost.decode_s(sequences, context, rows)
        return step_s + drafting * cost.decode_s(sequences, context) if drafting else step_s

    def _transfer_s(self) -> float:
        """What is left of sending a prompt's rows once its last chunk is computed: that chunk's."""
        if self.candidate.placement == "together":
            return 0.0
        tokens = self.workload.prompt_tokens * (1 - self.workload.prefix_share)
        return (
            min(tokens, self.site.chunk)
            * self.cost.kv_token_bytes
            / link_bytes_per_s(self.site.hardware, self.candidate)
        )


def link_bytes_per_s(hardware: Hardware, candidate: Candidate) -> float:
    """Rate of KV rows from prefill to decode."""
    if candidate.placement == "one" or not hardware.link_gb_s:
        return hardware.bandwidth * HOST_LINK_SHARE
    return hardware.link_gb_s * 1e9


def wire_codec(link: float) -> str:
    """The codec that makes rows arrive soonest: encoding pays below the break-even b / (1 / (1 - ratio)) of a link.

    Sending n bytes takes n / link raw, and n / encode + ratio n / link encoded; so int8 wins below encode (1 - ratio).
    """
    return "int8" if link < WIRE_BYTES_PER_S * (1 - WIRE_BYTES["int8"]) else "raw"


def _part(hardware: Hardware, share: float) -> Hardware:
    """Some of a host's cores: arithmetic in proportion, bandwidth more than that."""
    return replace(
        hardware,
        cores=max(1, int(hardware.cores * share)),
        float16=hardware.float16 * share,
        int8=hardware.int8 * share,
        bandwidth_gb_s=hardware.bandwidth_gb_s * share**CORES_OF_BANDWIDTH,
    )
