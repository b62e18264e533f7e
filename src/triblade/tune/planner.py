"""From a model's shape, hardware, a workload, goals and a quality floor to one Plan, with everything that was not chosen.

Pure and quick: no model is loaded, nothing is measured. Candidates that pass all gates are ranked by the time of a request, or by
cost. The model is wrong by some percent (docs/log.md), so among candidates that it cannot tell apart the decision tables choose,
and where they are silent the plainest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from triblade.config import PlanConfig, ServingEngine, Workload
from triblade.config.plan import Objective
from triblade.errors import ConfigError
from triblade.tune.bill import Bill, bill
from triblade.tune.candidates import baseline, candidates
from triblade.tune.gates import Judged, Rejection, Task, judge
from triblade.tune.hardware import Hardware, kernels_of
from triblade.tune.rules import Rule, advice, fitting_rules, workload_of
from triblade.tune.serving import Candidate, Site
from triblade.tune.shape import ModelShape

CHUNKS = {"cpu": 512, "cuda": 2048}  # tokens of a step
BURST_DEVIATIONS = 3
TIE = 0.1  # times of a request that differ by less are the same: about the model's median error
AXES = {
    "weights": ("weights",),
    "KV": ("kv_dtype",),
    "drafts": ("drafter", "draft_length"),
    "placement": ("placement", "split", "prefill_devices", "chunk"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen, and everything it was chosen from.

    Attributes:
        task: with the engine that is to serve.
        ranked: what passed all gates, the chosen one first.
        rejected: what did not.
        before: none of the three techniques on the same hardware; None where that does not even fit.
    """

    task: Task
    ranked: Sequence[Judged]
    rejected: Sequence[Rejection]
    rules: Sequence[Rule]
    before: Judged | None
    bill: Bill | None

    @property
    def chosen(self) -> Judged:
        return self.ranked[0]

    @property
    def runner_up(self) -> Judged | None:
        """The best that differs in more than the length of drafts or the split of memory."""
        mine = _kind(self.chosen.candidate)
        return next((other for other in self.ranked[1:] if _kind(other.candidate) != mine), None)


def decide(config: PlanConfig, shape: ModelShape, hardware: Hardware) -> Decision:
    """Choose how to serve.

    Raises:
        ConfigError: nothing passes the gates; the message says how many failed at which.
    """
    workload = workload_of(config)
    rules = fitting_rules(hardware, config.devices, workload, config.max_ppl_increase)
    rejected: list[Rejection] = []
    engines: tuple[ServingEngine, ...] = ("triblade", "vllm") if hardware.kind == "cuda" else ("triblade",)
    for engine in engines:
        task = _task(config, shape, hardware, workload, engine)
        every = candidates(
            shape, hardware, config.devices, config.draft_model, small_chunks=config.pause_ms is not None
        )
        judged = [_guessing(judge(one, task)) for one in every]
        rejected += [one for one in judged if isinstance(one, Rejection)]
        ranked = rank([one for one in judged if isinstance(one, Judged)], rules, config.objective)
        if ranked:
            before = _before(task, hardware)
            return Decision(
                task=task,
                ranked=ranked,
                rejected=rejected,
                rules=rules,
                before=before,
                bill=bill(config, workload, ranked[0].outcome, before.outcome if before else None),
            )
    raise _nothing(rejected)


def rank(passed: Sequence[Judged], rules: Sequence[Rule], objective: Objective = "latency") -> list[Judged]:
    """Best first, but for those within the model's error of the best: there what the rules advise, then the plainest."""
    if not passed:
        return []
    ordered = sorted(passed, key=lambda one: _seconds(one, objective))
    limit = _seconds(ordered[0], objective) * (1 + TIE)
    said = advice(tuple(rules))
    near = [one for one in ordered if _seconds(one, objective) <= limit]
    near.sort(key=lambda one: (-agreement(one.candidate, said), effort(one.candidate), _seconds(one, objective)))
    return [*near, *ordered[len(near) :]]


def _seconds(judged: Judged, objective: Objective) -> float:
    """What is to be small: the time of a request, or that of the hardware for one at full load."""
    return judged.outcome.e2el_s if objective == "latency" else 1 / judged.outcome.capacity_requests_per_s


def agreement(candidate: Candidate, said: object) -> int:
    """How much of the rules' advice a candidate follows."""
    advised = dict(said) if isinstance(said, dict) else {}
    split = candidate.split if candidate.placement == "one" else None
    mine = {
        "bits": candidate.weights.bits,
        "speculate": candidate.drafter is not None,
        "draft_length": candidate.draft_length,
        "placement": candidate.placement,
        "split": split,
    }
    return sum(mine[name] == value for name, value in advised.items())


def effort(candidate: Candidate) -> int:
    """What a candidate asks of whoever runs it: a conversion, a head, processes."""
    cost = {None: 0, "suffix": 1, "eagle": 2, "draft": 2}
    return (
        (candidate.weights.scheme not in ("bf16", "stored"))
        + (candidate.kv_dtype == "int8")
        + cost[candidate.drafter]
        + 2 * (candidate.placement != "together")
    )


def alternatives(decision: Decision) -> dict[str, Judged]:
    """For each technique the best candidate that differs from the chosen one in it alone."""
    mine = decision.chosen.candidate
    found: dict[str, Judged] = {}
    for axis, names in AXES.items():
        others = [one for one in decision.ranked[1:] if _differs_in(one.candidate, mine) <= set(names)]
        if others:
            found[axis] = min(others, key=lambda one: one.outcome.e2el_s)
    return found


def sequences_of(judged: Judged, task: Task) -> int:
    """Requests that one engine should compute together: what is expected in flight and half as many again.

    Those that come at a rate come in bursts (their number has the spread of a Poisson distribution): room for three deviations.
    """
    engines = max(1, (task.site.devices - judged.candidate.prefill_devices) // judged.candidate.tensor_parallel)
    mean = judged.outcome.in_flight / engines
    burst = 0.0 if task.workload.request_rate is None else mean + BURST_DEVIATIONS * math.sqrt(mean)
    return max(1, math.ceil(max(1.5 * mean, burst)))


def _guessing(judged: Judged | Rejection) -> Judged | Rejection:
    """A last gate of plans: a drafter that makes no guess, since none pays, is the same as none."""
    if isinstance(judged, Rejection) or judged.candidate.drafter is None or judged.outcome.tokens_per_step > 1:
        return judged
    reason = f"no guess pays with {judged.outcome.in_flight:.3g} requests in flight"
    return Rejection(candidate=judged.candidate, gate="drafts", reason=reason)


def _task(config: PlanConfig, shape: ModelShape, hardware: Hardware, workload: Workload, engine: ServingEngine) -> Task:
    site = Site(hardware=hardware, kernels=kernels_of(hardware), devices=config.devices, chunk=CHUNKS[hardware.kind])
    return Task(shape=shape, site=site, workload=workload, goals=config.goals, quality=config.quality, engine=engine)


def _before(task: Task, hardware: Hardware) -> Judged | None:
    """The baseline, whatever the goals; at a rate that it cannot do, as a closed loop of the workload's users."""
    free = replace(task, goals=replace(task.goals, ttft_ms=None, tpot_ms=None, e2el_ms=None, pause_ms=None))
    plain = judge(baseline(task.shape, hardware), free)
    if isinstance(plain, Rejection) and plain.gate == "rate":
        plain = judge(plain.candidate, replace(free, workload=replace(task.workload, request_rate=None)))
    return plain if isinstance(plain, Judged) else None


def _kind(candidate: Candidate) -> Candidate:
    return replace(candidate, draft_length=0, split="", chunk=None)


def _differs_in(one: Candidate, other: Candidate) -> set[str]:
    return {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}


def _nothing(rejected: Sequence[Rejection]) -> ConfigError:
    """Why there is no plan: each gate with the candidate that came furthest, which is the last one listed."""
    gates = {one.gate: one for one in rejected}
    counts = {gate: sum(one.gate == gate for one in rejected) for gate in gates}
    parts = [f"{counts[gate]} at {gate} (such as: {one.candidate}: {one.reason})" for gate, one in gates.items()]
    return ConfigError(
        f"no way to serve this passes all gates: {'; '.join(parts)}",
        hint="allow more: goals, --max-ppl-increase, more --devices, a lower rate, or larger hardware",
    )
