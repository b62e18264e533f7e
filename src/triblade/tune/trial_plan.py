"""From a point of the tuning space to the Plan that a trial serves, with the cost model's prediction for the same traffic. Pure.

Goals and quality floor reject nothing here: a trial finds out. What cannot run at all (no memory for it) is refused with the
gate's reason, which is a failed trial that costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from triblade.config import BenchConfig, Figure, Goals, Plan, QualityFloor, TuneConfig, WeightPlan, Workload
from triblade.errors import ConfigError, TuneError
from triblade.tune.candidates import SCHEMES
from triblade.tune.cost import Weights
from triblade.tune.gates import Judged, Rejection, Task, judge
from triblade.tune.hardware import Hardware, kernels_of
from triblade.tune.make_plan import make_plan
from triblade.tune.planner import Decision, decide
from triblade.tune.points import NO_DRAFTER, TOGETHER, Point, Space
from triblade.tune.rules import workload_of
from triblade.tune.serving import Candidate, Site
from triblade.tune.shape import ModelShape

CHAT_TURNS = 2
LEAST_PROMPT_TOKENS = 8
# Figures of a plan -> figures of a run, which the report sets side by side.
PREDICTED = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "e2el": "e2el_ms",
    "output_throughput": "output_tokens_per_s",
    "memory": "memory_mib",
}
BENCH_NAMES = {
    "edit": "fixed",
    "short": "random",
    "long-output": "random",
}  # workloads that differ in their lengths only


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a trial's weights are in, and the command that makes it; empty: they are there."""

    model: str
    convert: str = ""


@dataclass(frozen=True, slots=True)
class TrialPlanner:
    """Plans for points, all for one model, machine and workload."""

    config: TuneConfig
    shape: ModelShape
    hardware: Hardware

    def plan(self, point: Point, checkpoint: Checkpoint) -> Plan:
        """What is served in a trial.

        Raises:
            TuneError: it cannot run here.
        """
        decision = self._decision(point)
        made = make_plan(decision, self.config.plan)
        # The rules on whether a prompt's length is worth drafts are for those who do not measure: here the policy decides.
        engine = replace(made.decode, direct_prompt_tokens=0, speculate_prompt_tokens=0)
        engine = replace(engine, model=checkpoint.model, max_num_batched_tokens=point.chunk)
        has_workers = point.placement != TOGETHER
        transfer = replace(
            made.transfer, wire_codec=point.wire_codec, remote_prefill_tokens=point.remote_prefill_tokens
        )
        return replace(
            made,
            decode=engine,
            prefill=engine if has_workers else None,
            transfer=transfer if has_workers else made.transfer,
            weights=WeightPlan(scheme=point.weights, convert=checkpoint.convert),
            goals=self.config.goals,
            quality=self.config.plan.quality,
            reasons=(),
        )

    def chosen(self, space: Space) -> Point | None:
        """What `plan` would choose; None: nothing, or what is not in the space."""
        try:
            candidate = decide(self.config.plan, self.shape, self.hardware).chosen.candidate
        except ConfigError:
            return None
        point = Point(
            weights=candidate.weights.scheme,
            kv_dtype=candidate.kv_dtype,
            drafter=candidate.drafter or NO_DRAFTER,
            draft_length=candidate.draft_length,
            placement=candidate.split if candidate.placement == "one" else TOGETHER,
        ).plain
        return point if all(getattr(point, name) in values for name, values in space.choices.items()) else None

    @property
    def workload(self) -> Workload:
        """What is asked for, on average."""
        return workload_of(self.config.plan)

    def _decision(self, point: Point) -> Decision:
        site = Site(hardware=self.hardware, kernels=kernels_of(self.hardware), devices=1, chunk=point.chunk)
        task = Task(
            shape=self.shape,
            site=site,
            workload=self.workload,
            goals=Goals(),
            quality=QualityFloor(max_ppl_increase=float("inf")),
            engine="triblade",
            requests=self.config.num_requests,
        )
        found = judge(self._candidate(point), task)
        if isinstance(found, Rejection):
            raise TuneError(f"cannot run here ({found.gate}): {found.reason}")
        assert isinstance(found, Judged)
        return Decision(task=task, ranked=[found], rejected=[], rules=[], before=None, bill=None)

    def _candidate(self, point: Point) -> Candidate:
        found = Candidate(
            weights=self._weights(point.weights),
            kv_dtype=point.kv_dtype,
            drafter=None if point.drafter == NO_DRAFTER else point.drafter,
            draft_length=0 if point.drafter == NO_DRAFTER else point.draft_length,
        )
        return found if point.placement == TOGETHER else replace(found, placement="one", split=point.placement)

    def _weights(self, scheme: str) -> Weights:
        bits = self.shape.stored_bits if scheme == "stored" else SCHEMES[scheme]
        table_bits = 8 if self.hardware.kind == "cpu" and bits < 16 else 16
        return Weights(scheme=scheme, bits=bits, table_bits=table_bits)


def prediction(plan: Plan) -> dict[str, float]:
    """What a plan foresees, by the names of a run."""
    found = {PREDICTED[figure.name]: figure.value for figure in plan.prediction if figure.name in PREDICTED}
    return {**found, "memory_mib": plan.figure("memory") * 1e9 / 2**20}


def traffic(config: TuneConfig, workload: Workload, run: int) -> BenchConfig:
    """The load test of a run: every trial's first run has the same prompts, its second one others.

    A conversation of two turns whose first prompt has p tokens and whose answers have o has prompts of (3p + o) / 2 on average.
    """
    prompt, turns = workload.prompt_tokens, 1
    if workload.name == "chat":
        turns = CHAT_TURNS
        prompt = max(LEAST_PROMPT_TOKENS, round((2 * prompt - workload.output_tokens) / 3))
    prefix = round(prompt * workload.prefix_share) if workload.name == "shared-prefix" else 0
    return BenchConfig(
        workload="replay" if config.dataset is not None else BENCH_NAMES.get(workload.name, workload.name),  # type: ignore[arg-type]
        dataset=config.dataset,
        num_requests=config.num_requests,
        prompt_tokens=max(LEAST_PROMPT_TOKENS, prompt - prefix),
        output_tokens=workload.output_tokens,
        prefix_tokens=prefix,
        turns=turns,
        concurrency=max(1, round(workload.concurrency)),
        seed=1000 * config.seed + run,
        warmup_requests=2 if run == 0 else 0,
        request_timeout_s=60 * config.trial_minutes,
    )


def with_figures(plan: Plan, figures: Mapping[str, tuple[float, str]]) -> Plan:
    """A plan that tells what was measured before what was predicted."""
    found = tuple(Figure(name=n, value=round(v, 4), unit=unit, label="measured") for n, (v, unit) in figures.items())
    return replace(plan, prediction=(*found, *plan.prediction))
