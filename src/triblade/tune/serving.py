"""From the cost of steps to latencies and throughput of a candidate under a workload. Pure; means only, no simulation.

Closed loop: users wait for their answers. One device takes turns between prompts and steps, so everybody's prompts delay
everybody's tokens; with workers of their own they do not, and the slower stage sets the pace. Where answers are of one length,
users move in waves: all prompts wait for each other once, when users begin together, and later those that share a step do.
Open loop: the requests in flight follow from the rate by Little's law; a rate that is never caught up with has no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from triblade.config import Workload
from triblade.tune.cost import StepCost, Weights
from triblade.tune.hardware import Hardware, Kernels
from triblade.tune.rules import acceptance

Placement = Literal[
    "together", "one", "two"
]  # prefill and decode in one engine, in two on one device, on devices of their own
UNEVEN = frozenset({"random", "short", "long-output"})  # workloads whose answers differ in length
ITERATIONS, SETTLED = 40, 1e-5
MOST_WAITING = 0.95
SHARED_DEVICE_COST = 1.03  # two processes taking turns on one GPU; a guess, not measured
SLICED_STEPS = 2.0  # that a step takes beside a prompt on the same GPU, by time slices; a guess, not measured
CORES_OF_BANDWIDTH = (
    0.6  # exponent: half of the cores read two thirds of the bandwidth (docs/log.md: 20 to 27 of 34 to 42 GB/s)
)
TURN_S = 0.01  # from the end of an answer to the same user's next prompt in the queue, tokenized
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
            "two": f"P/D with {self.prefill_devices} device{'s' * (self.prefill_devices > 1)} for prompts",
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
    candidate: Candidate,
    cost: StepCost,
    site: Site,
    workload: Workload,
    most_in_flight: float,
    requests: float = math.inf,
) -> Outcome | float:
    """What users will see; a number, where the rate is too much: the requests per second that it can do at most.

    Args:
        candidate: the combination.
        cost: of its steps on one whole device.
        site: where it runs.
        workload: what is asked for.
        most_in_flight: requests whose KV fits, on all devices together.
        requests: of the test whose means are asked for; infinite: traffic that goes on.
    """
    load = _Load(candidate, cost, site, workload, most_in_flight, requests)
    full = load.closed(most_in_flight).requests_per_s
    if workload.request_rate is None:
        return replace(load.closed(workload.concurrency), capacity_requests_per_s=full)
    if workload.request_rate >= full * MOST_WAITING:
        return full * MOST_WAITING
    rate = workload.request_rate
    users = settled(lambda n: rate * load.closed(max(n, 1e-3)).e2el_s, rate * load.closed(1).e2el_s)
    return replace(load.closed(users), requests_per_s=workload.request_rate, capacity_requests_per_s=full)


def settled(step: Callable[[float], float], value: float) -> float:
    """What a step no longer changes, or hardly; half of each step is taken, since whole ones may go to and fro."""
    for _ in range(ITERATIONS):
        before, value = value, (value + step(value)) / 2
        if abs(value - before) <= SETTLED * abs(value):
            break
    return value


@dataclass(frozen=True, slots=True)
class _Load:
    """One candidate with everything that its predictions need."""

    candidate: Candidate
    cost: StepCost
    site: Site
    workload: Workload
    most_in_flight: float
    requests: float

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
            tokens_per_step=self._drafting(self._paying_length(running))[0],
            in_flight=users,
        )

    def _together(self, users: float) -> tuple[float, float]:
        """TTFT and whole time where prompts and steps take turns on a device, in one process or two."""
        if self._has_own_cores:
            return self._apart(users)
        each = max(1.0, users / (self.site.devices / self.candidate.tensor_parallel))
        decode_s = self._decode_s(self.cost, each, sending=1.0)
        first_s, prompts_s = self._wave(each, decode_s) if self._is_even else self._mixed(each, decode_s)
        shared = SHARED_DEVICE_COST if self.candidate.placement == "one" else 1.0
        e2el_s = (prompts_s + decode_s) * shared
        return min(first_s * shared + self._transfer_s(), e2el_s), e2el_s

    def _mixed(self, users: float, decode_s: float) -> tuple[float, float]:
        """First token of a request that comes at any time, and all prompts that are computed while it is here."""
        prompt_s = self._prompts_s(self.cost, 1.0)
        others = (users - 1) * prompt_s / (users * prompt_s + decode_s)
        first_s = prompt_s / (1 - min(others, MOST_WAITING)) + self._token_s(decode_s)
        return first_s, users * prompt_s

    def _wave(self, users: float, decode_s: float) -> tuple[float, float]:
        """The mean first token, and all prompts that are computed while a request is here; those within a chunk end with it.

        When users begin together, each turn of prompts waits for all before it. In these steps the earlier users get tokens, so
        that they end earlier: by as many steps as the next turn's prompts take, which are thus done just when that turn ends. From
        then on a prompt waits only for the steps that its predecessor lost between an answer and the next question.
        """
        together = self._prompts_of_a_chunk(users)
        turn_s, turns = self._prompts_s(self.cost, together), users / together
        steps = max(1.0, together * self._new_tokens / self.site.chunk)
        burst = steps * (turns - 1) / 2
        lost = (1 + TURN_S / max(self._token_s(decode_s), 1e-9)) * (turns - 1) / turns
        first_share = min(1.0, self.workload.concurrency / self.requests)  # of a test, those that begin together
        waited = first_share * burst + (1 - first_share) * min(burst, lost)
        return turn_s * (1 + waited / steps), turn_s * turns

    def _token_s(self, decode_s: float) -> float:
        """A token's part of an answer's time."""
        return decode_s / max(1, self.workload.output_tokens - 1)

    def _apart(self, users: float) -> tuple[float, float]:
        """The same where prompts have devices, or cores, of their own: two stages side by side."""
        prefill, decode, servers, streams = self._stages()
        together = self._prompts_of_a_chunk(users / servers) if self._is_even else 1.0
        prompt_s = self._prompts_s(prefill, together)
        turns, moved_s = users / together, self._transfer_s() * together

        def parts(e2el_s: float) -> tuple[float, float]:
            """First token and decoding, if a request takes so long."""
            busy = min(turns * prompt_s / servers / e2el_s, MOST_WAITING)
            waiting_s = busy / (1 - busy) * prompt_s / 2 * (turns - 1) / turns if turns > 1 else 0.0
            first_s = waiting_s + prompt_s + moved_s
            share = max(0.05, 1 - first_s / e2el_s)
            # Where both share a host, its other cores send what is ready while no prompt is computed.
            return first_s, self._decode_s(decode, max(1.0, users * share / streams), sending=busy)

        begin_s = prompt_s + moved_s + self._decode_s(decode, max(1.0, users / streams), sending=0.0)
        e2el_s = settled(lambda seconds: max(sum(parts(seconds)), turns * prompt_s / servers), begin_s)
        decode_s = parts(e2el_s)[1]
        return e2el_s - decode_s + self._token_s(decode_s), e2el_s

    def _pause_s(self, users: float) -> float:
        """Between two tokens of a stream: a step, and beside it in one engine as many tokens of others' prompts as it takes."""
        if self.candidate.placement == "two" or self._has_own_cores:
            _, decode, _, streams = self._stages()
            return self._step_s(decode, max(1.0, users / streams), self._draft_length)
        each = max(1.0, users / (self.site.devices / self.candidate.tensor_parallel))
        step_s = self._step_s(self.cost, each, self._draft_length)
        if each == 1:
            return step_s
        if self.candidate.placement == "one":
            return SLICED_STEPS * step_s
        cached, others = self.workload.prompt_tokens - self._new_tokens, (each - 1) * self._new_tokens
        return step_s + self.cost.prefill_s(max(1.0, min(self.site.chunk, others)), cached, self.site.chunk)

    @property
    def _has_own_cores(self) -> bool:
        """Two workers on a host without accelerator."""
        return self.candidate.placement == "one" and self.site.hardware.kind == "cpu"

    @property
    def _is_even(self) -> bool:
        """Whether users move in waves."""
        return self.workload.request_rate is None and self.workload.name not in UNEVEN

    @property
    def _new_tokens(self) -> float:
        """Of a prompt, those that are not in the cache."""
        return max(1.0, self.workload.prompt_tokens * (1 - self.workload.prefix_share))

    def _prompts_of_a_chunk(self, prompts: float) -> float:
        """How many of so many prompts one step computes."""
        return max(1.0, min(prompts, self.site.chunk / self._new_tokens))

    def _stages(self) -> tuple[StepCost, StepCost, float, float]:
        """Costs of both stages, and how many of each there are."""
        if self.candidate.placement == "two":
            apart = self.candidate.prefill_devices
            return self.cost, self.cost, apart, self.site.devices - apart
        half = replace(self.cost, hardware=_part(self.site.hardware, 0.5))
        return half, half, 1, 1

    def _prompts_s(self, cost: StepCost, together: float) -> float:
        """One prompt in its chunks, or several in one."""
        cached, new = self.workload.prompt_tokens - self._new_tokens, self._new_tokens
        if together <= 1:
            return cost.prefill_s(new, cached, self.site.chunk)
        return cost.prompts_step_s(together * new, cached + new / 2, together)

    def _decode_s(self, cost: StepCost, sequences: float, *, sending: float) -> float:
        """All tokens of an answer but the first, with as many guesses of those allowed as are quickest: the policy finds out.

        Args:
            sending: share of the time for sending answers that this device's processor spends.
        """
        sending_s = sending * sequences * self.site.kernels.event_us * 1e-6
        token_s = min(self._guessing(cost, sequences, sending_s))
        return token_s * max(0, self.workload.output_tokens - 1)

    def _guessing(self, cost: StepCost, sequences: float, sending_s: float) -> list[float]:
        """Seconds of a token with no guess, one, two and so on, as many as are allowed."""
        lengths = range(self._draft_length + 1)
        return [(self._step_s(cost, sequences, n) + sending_s) / self._drafting(n)[0] for n in lengths]

    def _paying_length(self, users: float) -> int:
        """Guesses that are quickest with so many users."""
        each = max(1.0, users / (self.site.devices / self.candidate.tensor_parallel))
        seconds = self._guessing(self.cost, each, each * self.site.kernels.event_us * 1e-6)
        return seconds.index(min(seconds))

    def _step_s(self, cost: StepCost, sequences: float, length: int) -> float:
        """A step of streams, with drafting for it."""
        _, rows, drafting = self._drafting(length)
        context = self.workload.prompt_tokens + self.workload.output_tokens / 2
        step_s = cost.decode_s(sequences, context, rows)
        return step_s + drafting * cost.decode_s(sequences, context) if drafting else step_s

    def _drafting(self, length: int) -> tuple[float, float, float]:
        """See `expected_tokens`, for this many guesses."""
        candidate = replace(self.candidate, draft_length=length) if length else replace(self.candidate, drafter=None)
        return expected_tokens(candidate, self.workload)

    @property
    def _draft_length(self) -> int:
        return 0 if self.candidate.drafter is None else self.candidate.draft_length

    def _transfer_s(self) -> float:
        """What is left of sending a prompt's rows once its last chunk is computed: that chunk's."""
        if self.candidate.placement == "together":
            return 0.0
        sent = min(self._new_tokens, self.site.chunk) * self.cost.kv_token_bytes
        return sent / link_bytes_per_s(self.site.hardware, self.candidate)


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
