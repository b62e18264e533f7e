"""A plan for people: what to run, what to expect beside the plain way, what else was possible, and why not. Pure text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from triblade.config import Plan, PlanConfig
from triblade.tune.bill import Bill
from triblade.tune.gates import Judged
from triblade.tune.make_plan import commands
from triblade.tune.planner import Decision

SHOWN_OTHERS = 3


def describe(decision: Decision, plan: Plan, config: PlanConfig) -> str:
    """The whole answer of `triblade plan`."""
    hardware, workload = decision.task.site.hardware, plan.workload
    load = f"{workload.request_rate:g} requests/s" if workload.request_rate else f"{workload.concurrency:g} in flight"
    head = [
        f"{config.model} on {config.devices} x {hardware.name} ({hardware.label}: {hardware.source})",
        f"workload {workload.name}: prompts of {workload.prompt_tokens}, answers of {workload.output_tokens} tokens, {load}",
        "",
        f"chosen: {decision.chosen.candidate}{_on_each(decision)}",
    ]
    parts = [head, list(_comparison(decision)), list(_figures(plan)), list(_bill(decision.bill))]
    parts += [["because:", *(f"  - {reason}" for reason in plan.reasons)], list(_others(decision))]
    parts += [["run:", *(f"  {command}" for command in commands(plan, config))]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _on_each(decision: Decision) -> str:
    """Where several devices have an engine each."""
    candidate, devices = decision.chosen.candidate, decision.task.site.devices
    is_copied = candidate.placement == "together" and devices > candidate.tensor_parallel
    return f" on each of {devices // candidate.tensor_parallel} devices" if is_copied else ""


def as_json(decision: Decision, plan: Plan, config: PlanConfig) -> dict[str, Any]:
    """The same for programs; see `Plan` for the options themselves."""
    runner_up = decision.runner_up
    return {
        "chosen": str(decision.chosen.candidate),
        "serving_engine": plan.serving_engine,
        "prediction": {f.name: {"value": f.value, "unit": f.unit, "label": f.label} for f in plan.prediction},
        "before": None if decision.before is None else _numbers(decision.before),
        "runner_up": None if runner_up is None else {"candidate": str(runner_up.candidate), **_numbers(runner_up)},
        "rules": [{"id": rule.id, "says": rule.says, "source": rule.source} for rule in decision.rules],
        "reasons": list(plan.reasons),
        "rejected": [
            {"candidate": str(one.candidate), "gate": one.gate, "reason": one.reason} for one in decision.rejected
        ],
        "bill": None if decision.bill is None else {n: getattr(decision.bill, n) for n in Bill.__dataclass_fields__},
        "commands": commands(plan, config),
    }


def _comparison(decision: Decision) -> Iterator[str]:
    rows: list[tuple[str, Judged | None]] = [("none of the three", decision.before), ("chosen", decision.chosen)]
    rows.append(("runner-up", decision.runner_up))
    yield f"{'predicted':18} {'TTFT ms':>9} {'TPOT ms':>9} {'end ms':>9} {'tokens/s':>9} {'max req/s':>9} {'weights GB':>10}"
    for name, judged in rows:
        if judged is None:
            yield f"{name:18} {'does not fit' if name != 'runner-up' else 'there is none':>9}"
            continue
        n = _numbers(judged)
        yield (
            f"{name:18} {n['ttft_ms']:9.1f} {n['tpot_ms']:9.2f} {n['e2el_ms']:9.0f} {n['output_tokens_per_s']:9.0f} "
            f"{n['capacity_requests_per_s']:9.2f} {n['weight_memory_gb']:10.2f}"
        )


def _numbers(judged: Judged) -> dict[str, float]:
    outcome = judged.outcome
    return {
        "ttft_ms": outcome.ttft_s * 1e3,
        "tpot_ms": outcome.tpot_s * 1e3,
        "e2el_ms": outcome.e2el_s * 1e3,
        "output_tokens_per_s": outcome.output_tokens_per_s,
        "capacity_requests_per_s": outcome.capacity_requests_per_s,
        "weight_memory_gb": judged.memory.weight_bytes / 1e9,
    }


def _figures(plan: Plan) -> Iterator[str]:
    for label in ("predicted", "rule", "measured"):
        found = [f"{f.name} {_short(f.value)} {f.unit}" for f in plan.prediction if f.label == label]
        if found:
            yield f"{label}: {', '.join(found)}"


def _short(value: float) -> str:
    """Four digits, all of them where there are more before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bill(found: Bill | None) -> Iterator[str]:
    if found is None:
        return
    before = found.per_million_tokens_before
    yield f"cost (predicted): {_money(found.per_million_tokens, found)} per million output tokens" + (
        "" if before is None else f", before {_money(before, found)}"
    )
    if found.monthly is not None:
        earlier = "" if found.monthly_before is None else f", before {_money(found.monthly_before, found)}"
        yield f"a month: {_money(found.monthly, found)}{earlier}"
    if found.break_even_months is not None:
        yield f"break-even after {found.break_even_months:.1f} months"


def _money(amount: float, of: Bill) -> str:
    return f"{amount:,.2f} {of.currency}"


def _others(decision: Decision) -> Iterator[str]:
    """The next best, and at which gates how many ended, each with an example."""
    yield f"others that pass: {len(decision.ranked) - 1}"
    runner_up = decision.runner_up
    if runner_up is not None:
        yield f"  runner-up: {runner_up.candidate}"
    gates = Counter(one.gate for one in decision.rejected)
    yield f"rejected: {len(decision.rejected)} (all of them with --json)"
    for gate, count in gates.items():
        yield f"  {gate}: {count}"
        yield from (f"    {line}" for line in _examples(decision, gate))


def _examples(decision: Decision, gate: str) -> Sequence[str]:
    """One candidate for each different reason."""
    found = {one.reason: one for one in decision.rejected if one.gate == gate}
    return [f"{one.candidate}: {reason}" for reason, one in list(found.items())[:SHOWN_OTHERS]]
