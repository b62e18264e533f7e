"""A decision as a Plan: engine options, commands, figures with labels, and reasons in words. Pure; decides nothing.

Names of things that the commands make follow from the model's name: NAME-int4 is the checkpoint, NAME-head the eagle head.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from triblade.config import EngineConfig, Figure, Plan, PlanConfig, TopologyConfig, TransferConfig, WeightPlan, to_flags
from triblade.tune.gates import Judged, Task, context_length, tokens_of_a_request
from triblade.tune.planner import TIE, Decision, agreement, alternatives, sequences_of
from triblade.tune.rules import DIRECT_PROMPT_TOKENS, SPECULATE_PROMPT_TOKENS, acceptance, advice
from triblade.tune.serving import Candidate, link_bytes_per_s, wire_codec

PROCESS_BYTES = (
    200 * 2**20
)  # interpreter, torch, tokenizer; seen in nine trials of `tune`: 170 of one engine, 230 with workers
HEAD_BYTES = 50 * 2**20  # buffers and tables of an eagle head beside its weights: 43 to 65 seen in five runs
BFLOAT16_CAPABILITY = 8.0  # of NVIDIA's devices that multiply bfloat16; vLLM refuses such models on older ones
MADE_SCHEMES = ("int8", "int4", "int3")


def make_plan(decision: Decision, config: PlanConfig) -> Plan:
    """The Plan of what was chosen."""
    chosen, task = decision.chosen, decision.task
    candidate = chosen.candidate
    engine = engine_of(decision, config)
    return Plan(
        hardware=config.hardware,
        devices=config.devices,
        serving_engine=task.engine,
        tensor_parallel=candidate.tensor_parallel,
        decode=engine,
        prefill=engine if candidate.placement != "together" else None,
        topology=topology_of(candidate, config.devices),
        transfer=transfer_of(decision),
        weights=WeightPlan(scheme=candidate.weights.scheme, convert=convert_command(candidate, config)),
        workload=task.workload,
        goals=task.goals,
        quality=task.quality,
        prediction=tuple(figures(decision)),
        reasons=tuple(reasons(decision)),
    )


def engine_of(decision: Decision, config: PlanConfig) -> EngineConfig:
    """Options of the engine, or of each worker's together."""
    chosen, task = decision.chosen, decision.task
    candidate = chosen.candidate
    sequences = sequences_of(chosen, task)
    drafts = candidate.drafter is not None
    is_cpu = task.site.hardware.kind == "cpu"
    return EngineConfig(
        model=served_model(candidate, config),
        dtype=float_type(decision.task),
        kv_cache_dtype="int8" if candidate.kv_dtype == "int8" else "auto",
        max_model_len=context_length(task),
        max_num_seqs=sequences,
        max_num_batched_tokens=max(candidate.chunk or task.site.chunk, sequences),
        # Main memory is shared with others, so that the cache gets what the plan needs; a GPU's is the cache's own.
        kv_cache_memory_bytes=kv_bytes(decision, sequences) if is_cpu else None,
        drafter=candidate.drafter,  # type: ignore[arg-type]
        draft_model=draft_model(candidate, decision, config),
        num_speculative_tokens=candidate.draft_length if drafts else EngineConfig.num_speculative_tokens,
        direct_prompt_tokens=DIRECT_PROMPT_TOKENS if drafts else 0,
        speculate_prompt_tokens=SPECULATE_PROMPT_TOKENS if drafts else 0,
    )


def float_type(task: Task) -> Literal["auto", "float16"]:
    """The checkpoint's own, unless it may be bfloat16 and the device, for which another engine serves, has none."""
    capability = task.site.hardware.capability
    is_old = bool(capability) and float(capability) < BFLOAT16_CAPABILITY
    return "float16" if is_old and task.engine == "vllm" else "auto"


def kv_bytes(decision: Decision, sequences: int) -> int:
    """Memory of so many contexts, in both roles' parts of it, within what there is."""
    chosen, task = decision.chosen, decision.task
    layout = chosen.cost.layout
    roles = 2 if chosen.candidate.placement == "one" else 1
    wanted = roles * sequences * layout.blocks_for(context_length(task)) * layout.row_bytes
    return min(wanted, chosen.memory.kv_bytes)


def served_model(candidate: Candidate, config: PlanConfig) -> str:
    """The model, or the checkpoint that the plan has made of it."""
    made = candidate.weights.scheme in MADE_SCHEMES
    return f"{_short(config.model)}-{candidate.weights.scheme}" if made else config.model


def draft_model(candidate: Candidate, decision: Decision, config: PlanConfig) -> str | None:
    """What drafts, where the drafter is a model of its own and none comes with the package."""
    if candidate.drafter == "draft":
        return config.draft_model
    if candidate.drafter != "eagle" or decision.task.shape.has_head:
        return None
    return f"{_short(config.model)}-head"


def convert_command(candidate: Candidate, config: PlanConfig) -> str:
    """How the checkpoint is made; empty if the model is served as it is."""
    if candidate.weights.scheme not in MADE_SCHEMES:
        return ""
    words = ["triblade", "convert", config.model, "--output", served_model(candidate, config)]
    words += ["--bits", str(candidate.weights.bits), "--calibration", "self"]
    words += ["--max-ppl-increase", f"{config.max_ppl_increase:g}"]
    if candidate.weights.table_bits < 16:
        words += [
            "--embeddings",
            f"{candidate.weights.table_bits}row",
            "--lm-head",
            f"{candidate.weights.table_bits}row",
        ]
    return shlex.join(words)


def topology_of(candidate: Candidate, devices: int) -> TopologyConfig:
    """How many workers of each kind; both roles of one device are engines of one process, which hold the weights once."""
    if candidate.placement == "one":
        return TopologyConfig(prefill_workers=1, decode_workers=1, pd_memory=candidate.split, pd_isolation="thread")
    if candidate.placement == "two":
        apart = candidate.prefill_devices
        return TopologyConfig(prefill_workers=apart, decode_workers=devices - apart)
    replicas = devices // candidate.tensor_parallel
    return TopologyConfig(decode_workers=replicas) if replicas > 1 else TopologyConfig()


def transfer_of(decision: Decision) -> TransferConfig:
    """The codec that the link pays for, and which prompts are worth sending."""
    if decision.chosen.candidate.placement == "together":
        return TransferConfig()
    link = link_bytes_per_s(decision.task.site.hardware, decision.chosen.candidate)
    return TransferConfig(wire_codec=wire_codec(link), remote_prefill_tokens=DIRECT_PROMPT_TOKENS)


def commands(plan: Plan, config: PlanConfig) -> list[str]:
    """What to run, in order."""
    found = [plan.weights.convert] if plan.weights.convert else []
    if plan.serving_engine == "vllm":
        path = config.output or PurePath("plan.toml")
        if config.output is None:
            found.append(shlex.join(["triblade", "plan", *to_flags(config), f"--output={path}"]))
        return [*found, shlex.join(["triblade", "deploy", str(path)])]
    if plan.decode.drafter == "eagle" and plan.decode.draft_model is not None:
        found.append(shlex.join(["triblade", "align", plan.decode.model, "--output", plan.decode.draft_model]))
    if config.output is not None:
        return [*found, shlex.join(["triblade", "serve", "--plan", str(config.output)])]
    flags = [*to_flags(plan.decode), *to_flags(plan.topology), *to_flags(plan.transfer)]
    return [*found, shlex.join(["triblade", "serve", *flags])]


def figures(decision: Decision) -> Iterator[Figure]:
    """The prediction, for one device where it is memory, for all of them elsewhere."""
    chosen, outcome = decision.chosen, decision.chosen.outcome
    rows = (
        ("ttft", outcome.ttft_s * 1e3, "ms"),
        ("tpot", outcome.tpot_s * 1e3, "ms"),
        ("e2el", outcome.e2el_s * 1e3, "ms"),
        ("pause", outcome.pause_s * 1e3, "ms"),
        ("output_throughput", outcome.output_tokens_per_s, "tokens/s"),
        ("capacity", outcome.capacity_requests_per_s, "requests/s"),
        ("in_flight", outcome.in_flight, "requests"),
        ("weight_memory", chosen.memory.weight_bytes / 1e9, "GB"),
        ("memory", memory_gb(decision), "GB"),
    )
    yield from (Figure(name=name, value=round(value, 4), unit=unit, label="predicted") for name, value, unit in rows)
    yield Figure(name="tokens_per_step", value=round(outcome.tokens_per_step, 3), unit="tokens", label="rule")
    yield Figure(name="ppl_increase", value=round(chosen.ppl_increase, 4), unit="share", label="rule")


def memory_gb(decision: Decision) -> float:
    """Of a device: weights, activations and what requests hold of the cache; of a host also what processes are without these."""
    memory = decision.chosen.memory
    held: float = kv_bytes(decision, sequences_of(decision.chosen, decision.task))
    own = memory.total_bytes - memory.kv_bytes
    if decision.task.site.hardware.kind == "cpu":
        held = min(held, touched_bytes(decision))
        engines = 2 if decision.chosen.candidate.placement == "one" else 1
        own += PROCESS_BYTES + (engines - 1) * memory.activation_bytes
        if decision.chosen.candidate.drafter == "eagle":
            own += engines * HEAD_BYTES
    return (own + held) / 1e9


def touched_bytes(decision: Decision) -> float:
    """Of the cache, what a test's requests write in each role: blocks take memory when they are first used, then stay."""
    chosen, task = decision.chosen, decision.task
    roles = 2 if chosen.candidate.placement == "one" else 1
    return roles * task.requests * tokens_of_a_request(task.workload) * chosen.cost.kv_token_bytes


def reasons(decision: Decision) -> Iterator[str]:
    """Why this one: rules, what each technique brings, what the hardware forbids."""
    chosen, said = decision.chosen, advice(tuple(decision.rules))
    if decision.task.engine != "triblade":
        yield (
            str(decision.task.site.hardware.why_not_own_kernels or "the model needs several devices")
            + "; vLLM serves it"
        )
    for rule in decision.rules:
        yield f"rule {rule.id}: {rule.says}"
    if said:
        followed = agreement(chosen.candidate, said)
        yield f"{followed} of {len(said)} points of the rules' advice followed: they decide between times within {TIE:.0%}"
    else:
        yield f"times within {TIE:.0%} of the best count as equal, and the plainest choice is taken"
    for axis, other in alternatives(decision).items():
        yield f"{axis}: the best other choice ({_of_axis(axis, other.candidate)}) is predicted {_slower(other, chosen)}"
    drafter = chosen.candidate.drafter
    if drafter is None and "drafts" not in alternatives(decision):
        yield f"drafts: no guess pays with {chosen.outcome.in_flight:.3g} requests in flight"
    if drafter is not None:
        yield f"acceptance of {drafter}: {acceptance(drafter).source}"
    if chosen.candidate.weights.bits == 3:
        yield "3 bits make the file smaller; in memory kernels hold 4"
    yield f"speeds of kernels: {decision.task.site.kernels.source}"


def _slower(other: Judged, chosen: Judged) -> str:
    change = other.outcome.e2el_s / chosen.outcome.e2el_s - 1
    return f"{abs(change):.0%} {'slower' if change >= 0 else 'faster'} end to end"


def _of_axis(axis: str, candidate: Candidate) -> str:
    parts = {
        "weights": candidate.weights.scheme,
        "KV": candidate.kv_dtype,
        "drafts": f"{candidate.drafter} k {candidate.draft_length}" if candidate.drafter else "none",
        "placement": str(candidate).rpartition(", ")[2],
    }
    return parts[axis]


def _short(model: str) -> str:
    """The last part of a name, without a file's ending."""
    return PurePath(model.rpartition(":")[2]).name.removesuffix(".gguf") or "model"
