"""The plan of one engine as the plan of a fleet: as many engines of each kind as a simulation found, for `deploy`. Pure.

Options of engines stay as they are, and predictions are left out, since they are one engine's. Invariant: a plan has a prefill
engine exactly if there are prefill engines.
"""

from __future__ import annotations

from dataclasses import replace

from triblade.config import Plan
from triblade.deploy.simulation_size import Question, Sized


def fleet_plan(plan: Plan, question: Question, found: Sized) -> Plan:
    """The same plan with these counts, and why they are these."""
    rate = question.traffic.request_rate
    return replace(
        plan,
        devices=found.total * plan.tensor_parallel,
        prefill=(plan.prefill or plan.decode) if found.prefill else None,
        topology=replace(plan.topology, prefill_workers=found.prefill, decode_workers=found.replicas),
        workload=replace(plan.workload, request_rate=rate),
        prediction=(),
        reasons=(*plan.reasons, _reason(question, found)),
    )


def _reason(question: Question, found: Sized) -> str:
    counts = (
        f"{found.prefill} prefill and {found.replicas} decode engines" if found.prefill else f"{found.replicas} engines"
    )
    result, share = found.result, f"p{question.config.percentile}"
    first, each = (f"{1000 * values[share]:.4g} ms" for values in (result.ttft_s, result.tpot_s))
    kept = "keep" if question.is_good(result) else "miss"
    goals = f"{question.config.ttft_ms:g} and {question.config.tpot_ms:g} ms"
    rate = question.traffic.request_rate
    return (
        f"{counts}: simulated at {rate:g} requests/s they {kept} the goals ({share} {first} and {each}; asked {goals})"
    )
