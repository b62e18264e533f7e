"""A Plan in vLLM's options, and what gets lost: data from data, nothing is read, asked or started.

Every field of `EngineConfig`, `TransferConfig` and `TopologyConfig` stands in exactly one of the tables below or has a function of
its own here; a test counts them, so that a new option of ours cannot be dropped silently. An option at its default loses nothing.
What differs between releases is decided by `Accepted`, and `accepted.check` has the last word on every name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal

from triblade.config import DeployConfig, EngineConfig, Plan
from triblade.deploy.accepted import Accepted, check
from triblade.deploy.speculative import DRAFTS, DraftFacts, speculative_config
from triblade.errors import ConfigError, UnsupportedError

Role = Literal["whole", "prefill", "decode"]
ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

SAME = (
    "model", "revision", "tokenizer", "chat_template", "dtype", "max_model_len", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "max_logprobs", "seed", "block_size",
)  # fmt: skip
RENAMED = {"num_kv_blocks": "num_gpu_blocks_override"}
OWN = ("kv_cache_dtype", "attention_backend", "device", "tensor_parallel_size", "pipeline_parallel_size", *DRAFTS)
ALWAYS = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "max_logprobs")
LOST = {
    "quantization": "weights are not rounded while loading: they take 16 bits each; convert the model first (triblade convert)",
    "backend": "vLLM has kernels of its own",
    "linear_backend": "vLLM chooses its kernels for 4-bit weights by itself",
    "deterministic": "answers may depend on the batch in the last bits",
    "threads": "of engines in a cluster the container decides how many threads there are",
    "cpu_cores": "cores are not pinned",
    "spin_us": "vLLM's threads wait in their own way",
    "isa": "vLLM chooses the instruction set by itself",
}
TRANSFER_LOST = {
    "wire_codec": "keys and values travel as they lie in the cache, uncompressed",
    "wire_table": "belongs to the wire codec",
    "wire_error_limit": "belongs to the wire codec",
    "max_prefill_backlog": "prompts wait for a prefill engine however many wait there",
    "remote_kv_share": "requests whose keys and values are on their way may hold any share of the blocks",
    "transfer_timeout_s": "the connector decides how long it waits",
}
OWN_HOST = "it keeps what an engine computed for that engine alone, so nothing goes from prefill to decode engines"
CONNECTOR_LOST = {
    "OffloadingConnector": OWN_HOST,
    "SimpleCPUOffloadConnector": OWN_HOST,
    "MooncakeConnector": "it wants ids from a router of its own, and prompts are handed over as for NixlConnector",
}
TRANSFER_OWN = ("connector", "lease_s", "remote_prefill_tokens")
TOPOLOGY_LOST = {
    "pd_isolation": "prefill and decode are engines of their own, each with its weights",
    "worker_restarts": "an engine that ends is not started again here; a cluster does",
    "decode_address": "engines that run elsewhere are not joined",
    "prefill_address": "engines that run elsewhere are not joined",
    "attach_timeout_s": "belongs to engines that run elsewhere",
}
TOPOLOGY_OWN = ("prefill_workers", "decode_workers", "pd_memory", "prefill_threads")
KV_TYPES = {"int8": "int8_per_token_head"}
ATTENTION = {"flash_attn": "FLASH_ATTN", "flashinfer": "FLASHINFER", "triton": "TRITON_ATTN"}


@dataclass(frozen=True, slots=True)
class Loss:
    """Something of the plan that has no counterpart.

    Attributes:
        option: where it stands in the plan, with its value.
        lost: what happens instead.
    """

    option: str
    lost: str

    def __str__(self) -> str:
        return f"{self.option}: {self.lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRole:
    """Engines of one kind.

    Attributes:
        options: by the names of vLLM's engine arguments; values as JSON has them.
        replicas: engines with these options.
        devices: of each engine, on all its nodes.
        nodes: of each engine.
    """

    role: Role
    options: Mapping[str, Any]
    replicas: int
    devices: int = 1
    nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A plan for vLLM: engines, prefill before decode, and what is lost."""

    roles: tuple[ServedRole, ...]
    losses: tuple[Loss, ...]
    names: tuple[str, ...]  # clients may use for the model

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts have engines of their own."""
        return len(self.roles) > 1


@dataclass(slots=True)
class _Work:
    """What a translation is made from, and what it has lost so far."""

    plan: Plan
    config: DeployConfig
    accepted: Accepted
    drafts: DraftFacts
    losses: list[Loss] = field(default_factory=list)

    def lose(self, option: str, value: object, why: str) -> None:
        loss = Loss(f"{option} = {value}", why)
        if loss not in self.losses:
            self.losses.append(loss)


def translate(plan: Plan, config: DeployConfig, accepted: Accepted, drafts: DraftFacts | None = None) -> Translation:
    """The plan in the words of one vLLM.

    Args:
        plan: what to serve.
        config: where and how many.
        accepted: what that vLLM takes.
        drafts: what is known of the plan's drafts; default: nothing.

    Raises:
        ConfigError: an option that vLLM does not know, or a device that it does not have.
        UnsupportedError: something is lost and the configuration is strict.
    """
    work = _Work(plan, config, accepted, drafts or DraftFacts())
    _check_device(work)
    wanted: tuple[Role, ...] = ("prefill", "decode") if _is_disaggregated(work) else ("whole",)
    roles = tuple(_role(work, role) for role in wanted)
    _transfer_losses(work)
    names = config.served_model_name or (plan.decode.model,)
    if config.target == "ray" and len(names) > 1:
        work.lose("served_model_name", ", ".join(names[1:]), "Ray serves a model under one name, the first")
    for one in roles:
        check(one.options, accepted)
    if config.strict and work.losses:
        raise UnsupportedError(
            "parts of the plan have no counterpart in vLLM: " + "; ".join(map(str, work.losses)),
            hint="change the plan, or leave --strict out",
            param="strict",
        )
    return Translation(roles=roles, losses=tuple(work.losses), names=names)


def _is_disaggregated(work: _Work) -> bool:
    wanted = work.config.prefill_replicas
    return wanted > 0 if wanted is not None else work.plan.prefill is not None


def _check_device(work: _Work) -> None:
    wanted = work.plan.decode.device
    if wanted not in ("auto", work.accepted.device):
        raise ConfigError(f"the plan is for {wanted}, and this vLLM computes on {work.accepted.device}", param="device")


def _role(work: _Work, role: Role) -> ServedRole:
    """Options of one kind of engine."""
    plan, config = work.plan, work.config
    engine = plan.prefill if role == "prefill" and plan.prefill is not None else plan.decode
    options = dict(_engine_options(work, engine))
    options |= {"served_model_name": list(config.served_model_name or (plan.decode.model,))}
    options |= {"model": config.model} if config.model is not None else {}
    options |= _memory(work, engine, role)
    guesses = speculative_config(engine, config, work.accepted, work.drafts, work.lose)
    if guesses and (role != "prefill" or guesses["method"] not in ("ngram", "suffix")):
        options["speculative_config"] = guesses  # on both sides where the drafter keeps layers in the cache
    if role in ROLES:
        options["kv_transfer_config"] = _transfer(work, role)
    each = config.tensor_parallel_size or plan.tensor_parallel
    options |= _parallel(each, config.pipeline_parallel_size)
    options |= dict(map(_given_option, config.vllm_option))
    devices = each * config.pipeline_parallel_size
    nodes = max(1, -(-devices // config.devices_per_node))
    return ServedRole(role=role, options=options, replicas=_replicas(work, role, devices), devices=devices, nodes=nodes)


def _engine_options(work: _Work, engine: EngineConfig) -> Iterator[tuple[str, Any]]:
    """What one table of the plan becomes; losses are noted."""
    for each in fields(EngineConfig):
        value, name = getattr(engine, each.name), each.name
        is_said = each.default is MISSING or value != each.default
        if name in SAME and (is_said or name in ALWAYS):
            yield name, _plain(value)
        elif name in RENAMED and is_said:
            yield RENAMED[name], value
        elif name in LOST and is_said and not _is_bound_here(work, name):
            work.lose(name, value, LOST[name])
    yield from _kv_type(work, engine)
    if engine.attention_backend in ATTENTION:
        yield "attention_backend", ATTENTION[engine.attention_backend]
    elif engine.attention_backend != "auto":
        work.lose("attention_backend", engine.attention_backend, "vLLM has no such attention; it chooses by itself")


def _is_bound_here(work: _Work, name: str) -> bool:
    """Threads and cores of processes that are started here are this side's to choose."""
    return name in ("threads", "cpu_cores") and work.config.target == "local"


def _given_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value as JSON where it is some, else as text."""
    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _kv_type(work: _Work, engine: EngineConfig) -> Iterator[tuple[str, Any]]:
    wanted = engine.kv_cache_dtype
    if wanted == "auto":
        return
    name = KV_TYPES.get(wanted, wanted)
    if name in work.accepted.kv_dtypes:
        yield "kv_cache_dtype", name
        return
    why = f"vLLM on {work.accepted.device} keeps keys and values in the model's type"
    work.lose("kv_cache_dtype", wanted, why + (": twice the memory per token" if wanted == "int8" else ""))


def _memory(work: _Work, engine: EngineConfig, role: Role) -> dict[str, Any]:
    """A role's part of the memory where both roles share it."""
    if role == "whole" or work.plan.devices > 1 or _is_cluster(work):
        return {}
    prefill, decode = replace(work.plan.topology, prefill_workers=1, decode_workers=1).shares
    share = prefill if role == "prefill" else decode
    if engine.kv_cache_memory_bytes is not None:
        return {"kv_cache_memory_bytes": int(engine.kv_cache_memory_bytes * share)}
    work.lose(
        "pd_memory", work.plan.topology.pd_memory, "it divides all of the memory, weights included, not the KV cache"
    )
    return {"gpu_memory_utilization": round(engine.gpu_memory_utilization * share, 3)}


def _is_cluster(work: _Work) -> bool:
    return work.config.target != "local"


def _transfer(work: _Work, role: Role) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kv_connector": work.config.kv_connector,
        "kv_role": ROLES[role],
        "kv_load_failure_policy": work.config.kv_load_failure_policy,
    }
    lease = work.plan.transfer.lease_s
    extra = {} if lease == type(work.plan.transfer).lease_s else {"kv_lease_duration": round(lease)}
    extra |= dict(map(_given_option, work.config.kv_connector_option))
    return found | ({"kv_connector_extra_config": extra} if extra else {})


def _parallel(tensor: int, pipeline: int) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return {name: size for name, size in sizes.items() if size > 1}


def _replicas(work: _Work, role: Role, devices: int) -> int:
    config, topology = work.config, work.plan.topology
    if role == "prefill":
        return config.prefill_replicas or topology.prefill_workers or 1
    if config.decode_replicas is not None:
        return config.decode_replicas
    return topology.decode_workers or (1 if role == "decode" else max(1, work.plan.devices // devices))


def _transfer_losses(work: _Work) -> None:
    """Of transfers and workers, what was said and has no counterpart."""
    tables: list[tuple[object, Mapping[str, str]]] = [(work.plan.topology, TOPOLOGY_LOST)]
    if _is_disaggregated(work):
        tables.append((work.plan.transfer, TRANSFER_LOST))
        connector = work.config.kv_connector
        if connector in CONNECTOR_LOST:
            work.lose("kv_connector", connector, CONNECTOR_LOST[connector])
        if _is_cluster(work):
            why = "the cluster's router sends every prompt to a prefill engine first, short ones too"
            work.lose("remote_prefill_tokens", work.plan.transfer.remote_prefill_tokens, why)
    for table, lost in tables:
        for each in fields(table):  # type: ignore[arg-type]
            if each.name in lost and (value := getattr(table, each.name)) != each.default:
                work.lose(each.name, value, lost[each.name])
