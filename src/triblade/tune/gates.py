"""What a candidate must pass before it is compared: hardware, memory, quality, rate, latencies. Pure.

A gate answers with the reason for which it rejects, in words with both numbers; memory is decided by the arithmetic of the engine
itself (`engine.memory`), so what a plan says fits is what will be allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from triblade.config import EngineConfig, Goals, QualityFloor, ServingEngine, Workload
from triblade.engine.memory import MemoryPlan, Room, plan_memory
from triblade.errors import TribladeError
from triblade.kv.layout import LayerGroup
from triblade.tune.cost import StepCost
from triblade.tune.rules import ppl_increase
from triblade.tune.serving import Candidate, Outcome, Site, predict
from triblade.tune.shape import ModelShape

INT8_KV_PPL = 0.001  # docs/log.md: logits differ by 1.7e-2, best tokens equal; perplexity 16.519 -> 16.530
TENSOR_PARALLEL_SHARE = 0.8  # of the added rates; a guess, not measured
DRAFT_SHARE = 0.1  # of the target's weights, for a draft model that nobody has looked at
CONTEXT_STEP = 256
MOST_SEQUENCES = {"cpu": 64, "cuda": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a plan is made for.

    Attributes:
        requests: of the test that is to be predicted; infinite: traffic that goes on.
    """

    shape: ModelShape
    site: Site
    workload: Workload
    goals: Goals
    quality: QualityFloor
    engine: ServingEngine
    requests: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate that passed, with what it is predicted to give."""

    candidate: Candidate
    outcome: Outcome
    memory: MemoryPlan
    cost: StepCost

    @property
    def ppl_increase(self) -> float:
        return quality_loss(self.candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A candidate that did not, and the gate that rejected it."""

    candidate: Candidate
    gate: str
    reason: str


def judge(candidate: Candidate, task: Task) -> Judged | Rejection:
    """Send a candidate through the gates, the cheap ones first."""
    for gate, reason in (("hardware", _hardware(candidate, task)), ("quality", _quality(candidate, task.quality))):
        if reason is not None:
            return Rejection(candidate=candidate, gate=gate, reason=reason)
    if candidate.chunk is not None:
        task = replace(task, site=replace(task.site, chunk=candidate.chunk))
    cost = cost_of(candidate, task)
    try:
        memory = memory_of(candidate, task, MOST_SEQUENCES[task.site.hardware.kind])
    except TribladeError as error:
        return Rejection(candidate=candidate, gate="memory", reason=error.message)
    most = memory.num_kv_blocks * decode_share(candidate) * cost.layout.block_size / tokens_of_a_request(task.workload)
    if most < 1:
        reason = f"no room for the KV of one request beside {_gb(memory.weight_bytes)} of weights"
        return Rejection(candidate=candidate, gate="memory", reason=reason)
    most *= num_decoders(candidate, task.site.devices)
    outcome = predict(candidate, cost, task.site, task.workload, most, task.requests)
    if isinstance(outcome, float):
        reason = f"{task.workload.request_rate:g} requests/s, {outcome:.3g} at most"
        return Rejection(candidate=candidate, gate="rate", reason=reason)
    if (late := _goals(outcome, task.goals)) is not None:
        return Rejection(candidate=candidate, gate="goals", reason=late)
    return Judged(candidate=candidate, outcome=outcome, memory=memory, cost=cost)


def cost_of(candidate: Candidate, task: Task) -> StepCost:
    """Of steps on one device, or on those that share the model."""
    hardware, devices = task.site.hardware, candidate.tensor_parallel
    if devices > 1:
        factor = 1 + (devices - 1) * TENSOR_PARALLEL_SHARE
        hardware = replace(
            hardware,
            bandwidth_gb_s=hardware.bandwidth_gb_s * factor,
            float16=hardware.float16 * factor,
            int8=hardware.int8 * factor,
        )
    return StepCost(task.shape.config, hardware, task.site.kernels, candidate.weights, candidate.kv_dtype)


def memory_of(candidate: Candidate, task: Task, sequences: int) -> MemoryPlan:
    """What a candidate takes of a device; where both roles share it they share the weights, too.

    Raises:
        TribladeError: it does not fit.
    """
    cost = cost_of(candidate, task)
    layout, weights = cost.layout, cost.weight_bytes
    if candidate.drafter == "eagle":
        model = task.shape.config
        group = LayerGroup(num_layers=1, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
        layout, weights = replace(layout, draft=group), weights + cost.body_bytes / model.num_layers
    elif candidate.drafter == "draft":
        weights *= 1 + DRAFT_SHARE
    available = int(task.site.hardware.memory_bytes * candidate.tensor_parallel)
    config = EngineConfig(
        model=task.shape.name,
        max_model_len=context_length(task),
        max_num_seqs=sequences,
        max_num_batched_tokens=task.site.chunk,
    )
    return plan_memory(config, task.shape.config, layout, int(weights), Room(available_bytes=available, is_own=True))


def context_length(task: Task) -> int:
    """Tokens of the longest request, rounded up; never more than the model takes."""
    wanted = math.ceil(task.workload.longest_tokens / CONTEXT_STEP) * CONTEXT_STEP
    return min(wanted, task.shape.config.context_length)


def tokens_of_a_request(workload: Workload) -> float:
    """KV that a request holds when it ends; what it shares with others counts once, so here not at all."""
    return workload.prompt_tokens * (1 - workload.prefix_share) + workload.output_tokens


def decode_share(candidate: Candidate) -> float:
    """Of a device's KV memory, what decoding gets."""
    if candidate.placement != "one":
        return 1.0
    prefill, decode = (int(part) for part in candidate.split.split(":"))
    return decode / (prefill + decode)


def num_decoders(candidate: Candidate, devices: int) -> int:
    """Engines that answer requests."""
    return (devices - candidate.prefill_devices) // candidate.tensor_parallel


def quality_loss(candidate: Candidate) -> float:
    """Growth of perplexity, by rule."""
    return ppl_increase(candidate.weights.scheme) + (INT8_KV_PPL if candidate.kv_dtype == "int8" else 0.0)


def _hardware(candidate: Candidate, task: Task) -> str | None:
    if task.engine != "triblade":
        own = candidate.placement != "together" or candidate.drafter == "eagle" or candidate.kv_dtype == "int8"
        return "not planned for another engine: workers, eagle heads and int8 KV are this one's" if own else None
    if candidate.tensor_parallel > 1:
        return "one engine runs on one device"
    return task.site.hardware.why_not_own_kernels


def _quality(candidate: Candidate, floor: QualityFloor) -> str | None:
    loss = quality_loss(candidate)
    if loss <= floor.max_ppl_increase:
        return None
    return f"perplexity grows by about {loss:.1%}, allowed are {floor.max_ppl_increase:.1%}"


def _goals(outcome: Outcome, goals: Goals) -> str | None:
    limits: tuple[tuple[str, float, float | None], ...]
    limits = (("TTFT", outcome.ttft_s, goals.ttft_ms), ("TPOT", outcome.tpot_s, goals.tpot_ms))
    limits += (("end to end", outcome.e2el_s, goals.e2el_ms), ("pause of a stream", outcome.pause_s, goals.pause_ms))
    for name, value, limit in limits:
        if limit is not None and value * 1e3 > limit:
            return f"{name} {value * 1e3:.0f} ms, wanted {limit:g} ms"
    return None


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
