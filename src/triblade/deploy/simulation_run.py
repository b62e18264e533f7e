"""`triblade simulate`: from options, or a plan, to a question, its answers, and lines for people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from triblade.config import Plan, RouteConfig, SimulateConfig, Workload, read_toml, to_toml
from triblade.deploy.simulation import Site
from triblade.deploy.simulation_plan import fleet_plan
from triblade.deploy.simulation_replica import Limits
from triblade.deploy.simulation_size import Question, Sized, fewest, fewest_apart
from triblade.deploy.simulation_times import StepTimes, predicted_times
from triblade.deploy.simulation_traffic import Traffic
from triblade.errors import ConfigError, ModelNotFoundError
from triblade.files import written_whole
from triblade.tune.candidates import weights
from triblade.tune.gates import Task, cost_of, memory_of
from triblade.tune.hardware import Hardware, find_hardware, kernels_of
from triblade.tune.open_shape import open_shape
from triblade.tune.profile import this_machine
from triblade.tune.serving import Candidate
from triblade.tune.serving import Site as PlanSite
from triblade.tune.shape import ModelShape

MS, MICRO, NANO = 1e-3, 1e-6, 1e-9
CONVERT = ("triblade", "convert", "MODEL")  # how the command of a plan begins
KV_TOKENS = 400_000  # where nobody says


@dataclass(frozen=True, slots=True)
class Answer:
    """What was simulated: one arrangement that was asked for, or the fewest of each kind."""

    question: Question
    found: Sequence[Sized]

    @property
    def best(self) -> Sized:
        """The fewest replicas."""
        return min(self.found, key=lambda one: one.total)

    def __str__(self) -> str:
        times, config = self.question.site.times, self.question.config
        lines = [
            f"a step takes {times.step_s / MS:.3g} ms + {times.sequence_s / MICRO:.3g} us a sequence + "
            f"{times.context_token_s / NANO:.3g} ns a cached token + {times.prompt_token_s / MICRO:.3g} us a prompt token",
            f"goals at p{config.percentile}: first token {config.ttft_ms:g} ms, further ones {config.tpot_ms:g} ms",
            "",
            f"{'replicas':24}{'TTFT p50/p99 ms':>20}{'TPOT p50/p99 ms':>20}{'tokens/s':>10}{'busy':>12}{'hits':>7}  goals",
        ]
        return "\n".join([*lines, *map(self._line, self.found)])

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        rows = [{**asdict(one), "is_good": self.question.is_good(one.result)} for one in self.found]
        return {"times": asdict(self.question.site.times), "found": rows}

    def _line(self, one: Sized) -> str:
        result = one.result
        name = f"{one.prefill} prefill + {one.replicas} decode" if one.prefill else f"{one.replicas}"
        busy = f"{result.prefill_busy:.0%} + {result.busy:.0%}" if one.prefill else f"{result.busy:.0%}"
        ttft, tpot = (
            f"{values['p50'] / MS:.4g} / {values['p99'] / MS:.4g}" for values in (result.ttft_s, result.tpot_s)
        )
        kept = "kept" if self.question.is_good(result) else "missed"
        return (
            f"{name:24}{ttft:>20}{tpot:>20}{result.output_tokens_per_s:>10.0f}{busy:>12}{result.hit_rate:>7.0%}  {kept}"
        )


def answer(config: SimulateConfig) -> Answer:
    """Simulate what is asked for, or search.

    Raises:
        ConfigError: not even `max_replicas` are enough, or the plan cannot be read.
    """
    question = question_of(config)
    if config.replicas is not None:
        return Answer(question, [question.simulated(config.replicas, config.prefill or 0)])
    searches = [fewest] if config.prefill == 0 else [fewest, fewest_apart]
    found = [one for search in searches if (one := search(question)) is not None]
    if not found:
        raise ConfigError(
            f"not even {config.max_replicas} replicas keep the goals",
            hint="a goal below what one request alone takes is never kept; allow more, or raise --max-replicas",
        )
    return Answer(question, found)


def write_plan(config: SimulateConfig, found: Answer) -> None:
    """The fleet as a plan, if that is asked for."""
    if config.plan is None or config.output is None:
        return
    made = fleet_plan(read_toml(Plan, config.plan), found.question, found.best)
    with written_whole(config.output) as whole:
        whole.write_text(to_toml(made), encoding="utf-8")


def question_of(config: SimulateConfig) -> Question:
    """The traffic and the replicas.

    Raises:
        ConfigError: something is missing.
    """
    config.check_sources()
    plan = None if config.plan is None else read_toml(Plan, config.plan)
    workload = None if plan is None else plan.workload
    times, room = (_measured(config), KV_TOKENS) if plan is None else _predicted(plan, config)
    kv_tokens = room if config.kv_tokens is None else config.kv_tokens
    limits = Limits(chunk_tokens=config.chunk_tokens, max_running=config.max_num_seqs, kv_tokens=kv_tokens)
    site = Site(replicas=1, times=times, limits=limits, route=RouteConfig())
    return Question(_traffic(config, workload), site, config)


def _traffic(config: SimulateConfig, workload: Workload | None) -> Traffic:
    given = {
        "request_rate": config.request_rate,
        "prompt_tokens": config.prompt_tokens,
        "output_tokens": config.output_tokens,
    }
    shared = config.shared_tokens
    if workload is not None:
        given = {name: getattr(workload, name) if value is None else value for name, value in given.items()}
        shared = shared or round(workload.prompt_tokens * workload.prefix_share)
    if given["request_rate"] is None:
        raise ConfigError(
            "the plan is for a number of users, not a rate", hint="add --request-rate", param="request_rate"
        )
    return Traffic(
        request_rate=float(given["request_rate"]),
        prompt_tokens=int(given["prompt_tokens"] or 1),
        output_tokens=int(given["output_tokens"] or 1),
        shared_tokens=shared,
        turns=config.turns,
        think_s=config.think_s,
        spread=config.length_spread,
    )


def _measured(config: SimulateConfig) -> StepTimes:
    return StepTimes(
        step_s=(config.step_ms or 0.0) * MS,
        sequence_s=config.sequence_us * MICRO,
        context_token_s=config.context_token_ns * NANO,
        prompt_token_s=config.prompt_token_us * MICRO,
        request_s=config.request_ms * MS,
        transfer_s=config.transfer_ms * MS,
        transfer_token_s=(config.transfer_token_us or 0.0) * MICRO,
    )


def _predicted(plan: Plan, config: SimulateConfig) -> tuple[StepTimes, int]:
    """Of one replica that the plan describes: its steps by the cost model, and the tokens that its KV cache has room for."""
    hardware, shape = _hardware(plan.hardware), _shape(plan)
    site = PlanSite(hardware=hardware, kernels=kernels_of(hardware), devices=1, chunk=config.chunk_tokens)
    task = Task(
        shape=shape,
        site=site,
        workload=plan.workload,
        goals=plan.goals,
        quality=plan.quality,
        engine=plan.serving_engine,
    )
    stored = {one.scheme: one for one in weights(shape, hardware)}
    candidate = Candidate(
        weights=stored.get(plan.weights.scheme, next(iter(stored.values()))),
        kv_dtype="int8" if plan.decode.kv_cache_dtype == "int8" else "bfloat16",
        drafter=plan.decode.drafter,
        draft_length=plan.decode.num_speculative_tokens,
        tensor_parallel=plan.tensor_parallel,
    )
    cost, memory = cost_of(candidate, task), memory_of(candidate, task, config.max_num_seqs)
    times = predicted_times(candidate, cost, plan.workload, config.chunk_tokens)
    moved_s = times.transfer_token_s if config.transfer_token_us is None else config.transfer_token_us * MICRO
    own = {"request_s": config.request_ms * MS, "transfer_s": config.transfer_ms * MS, "transfer_token_s": moved_s}
    return replace(times, **own), memory.num_kv_blocks * cost.layout.block_size


def _hardware(name: str) -> Hardware:
    return this_machine() if name == "here" else find_hardware(name)


def _shape(plan: Plan) -> ModelShape:
    """Of the checkpoint, or of the model that it is to be made of."""
    try:
        return open_shape(plan.decode.model)
    except ModelNotFoundError:
        words = shlex.split(plan.weights.convert)
        if len(words) < len(CONVERT):
            raise
        return open_shape(words[len(CONVERT) - 1])
