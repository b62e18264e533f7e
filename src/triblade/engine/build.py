"""From an `EngineConfig` to a ready engine: open, choose kernels, plan memory, load, wire.

The only place that knows all parts of an engine at once. Everything it decides for the user is logged with its reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from triblade import host
from triblade.config import EngineConfig, cache_dir, forced_isa
from triblade.engine.attend import AttentionNeeds, StepAttention
from triblade.engine.attention_choice import OWN, choose_attention
from triblade.engine.block_pool import BlockPool
from triblade.engine.cuda import CudaExecutor, scratch_bytes, why_not_cuda
from triblade.engine.drafters import DrafterPlan, Kernels, TargetParts, plan_drafter
from triblade.engine.engine import Engine
from triblade.engine.executor import StepExecutor, TorchExecutor
from triblade.engine.linear_choice import OWN as OWN_PRODUCTS
from triblade.engine.linear_choice import choose_products
from triblade.engine.memory import MemoryPlan, Room, explained, plan_memory
from triblade.engine.native import NativeExecutor, in_one_piece
from triblade.engine.native_program import NativeOptions, make_team, why_not_native
from triblade.engine.probe import warn_if_never_right
from triblade.engine.runner import PROMPT_LOGITS_ROWS, ModelRunner
from triblade.engine.scheduler import Scheduler
from triblade.engine.speculation import Speculator, make_policy
from triblade.engine.weights import SharedWeights
from triblade.errors import MemoryBudgetError, UnsupportedError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout, LayerGroup
from triblade.kv.wire_rotation import rope_identity
from triblade.models.decoder import Decoder, DecoderWeights
from triblade.models.loader import OpenModel, open_model
from triblade.ops.backend import Linear
from triblade.ops.cuda.device import LEAST_CAPABILITY, CudaDevice, why_no_compiler
from triblade.ops.cuda.packing import DeviceMatrix
from triblade.ops.packing import PackedMatrix
from triblade.ops.select import select_backend, select_device
from triblade.quant.device_weights import DeviceReader, device_bytes
from triblade.quant.packed_weights import PackingReader, packed_bytes
from triblade.spec.sampler import Sampler
from triblade.structured.compiler import GrammarCompiler

log = logging.getLogger(__name__)

TORCH_ATTENTION = ("sdpa", "eager")
TOO_LARGE = (
    "end other processes on the device; or lower --gpu-memory-utilization, --max-model-len or --max-num-batched-tokens, "
    "or use --kv-cache-dtype int8 or --quantization int4"
)
KERNEL_CACHE = "kernels"  # under the folder of downloads
MakePool = Callable[[int, int], Tensor]  # (number of rows, bytes of a row) -> zeros


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is decided of an engine before anything is loaded."""

    kernels: Kernels
    drafter: DrafterPlan | None
    layout: KVLayout
    plan: MemoryPlan


def prepare(config: EngineConfig, model: OpenModel, device: torch.device, copies: int = 1) -> Preparation:
    """Choose kernels and plan memory, for `copies` engines that share one KV cache's memory; for none, the weights are there.

    Raises:
        TribladeError: something does not fit, with what to do.
    """
    kernels = choose_kernels(config, model, device)
    drafter = plan_drafter(config, model, kernels=kernels)
    layout = kv_layout(config, model, kernels == "native", drafter.layers if drafter else None)
    weight_bytes = _weight_bytes(config, model, kernels) + (drafter.weight_bytes if drafter else 0)
    loaded_bytes = 0 if copies else weight_bytes
    plan = plan_for(config, model, layout, max(1, copies) * weight_bytes, device, loaded_bytes)
    layout = replace(layout, rope=rope_identity(model.config, plan.context_length))
    return Preparation(kernels, drafter, layout, plan)


def build_engine(config: EngineConfig, make_pool: MakePool | None = None) -> Engine:
    """Load a model and make an engine of it; `make_pool` gives the memory of its KV rows, where it must be special.

    Raises:
        TribladeError: with what is wrong and what to do, before memory is taken where that can be known.
    """
    device, reason = select_device(config.device)
    log.info("device %s: %s", device, reason)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or host.usable_cores())
    model = open_model(config)
    return assemble(config, model, device, make_pool)


def assemble(
    config: EngineConfig,
    model: OpenModel,
    device: torch.device,
    make_pool: MakePool | None = None,
    weights: SharedWeights | None = None,
) -> Engine:
    """Wire an engine around an opened model; `weights` are those that it shares with other engines of this process."""
    weights = weights or SharedWeights()
    parts = prepare(config, model, device, copies=0 if weights.are_loaded else 1)
    plan, drafter_plan = parts.plan, parts.drafter
    _log_plan(plan, config.max_model_len or model.config.context_length)
    start = time.monotonic()
    with explained(f"loading {model.name}", device, TOO_LARGE):
        pool = None
        if make_pool is not None and device.type == "cpu":
            pool = make_pool(plan.num_kv_blocks, parts.layout.row_bytes)
        cache = KVCache(parts.layout, plan.num_kv_blocks, model.dtype, device, pool)
        target = _load(config, model, parts, cache, weights)
        drafter = drafter_plan.build(target) if drafter_plan else None
    model.checkpoint.release()
    host.return_code_pages()
    log.info("loaded %s in %.1f s, backend %s", model.name, time.monotonic() - start, target.executor.name)
    engine = Engine(
        model,
        ModelRunner(target.executor, Sampler(model.vocab_size)),
        _scheduler(config, plan.num_kv_blocks, target.executor),
        context_length=plan.context_length,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )
    engine.compile = GrammarCompiler(model.tokenizer, model.vocab_size).compile
    if drafter is not None:
        engine.speculator = Speculator(drafter, engine.scheduler, make_policy(config))
    if config.drafter == "draft":  # the only one that somebody else may have made for another model
        warn_if_never_right(engine)
    return engine


def _weight_bytes(config: EngineConfig, model: OpenModel, kernels: Kernels) -> int:
    """Memory that the weights will take in the form of these kernels."""
    if kernels == "reference":
        return model.weight_bytes
    count = packed_bytes if kernels == "native" else device_bytes
    copies = (
        2 if kernels == "cuda" and config.linear_backend != OWN_PRODUCTS else 1
    )  # at most: dense ones are not copied
    return copies * count(model.checkpoint, model.config, model.dtype, config.quantization)


def _log_plan(plan: MemoryPlan, wanted_context: int) -> None:
    log.info("%s", plan.describe())
    if plan.context_length < wanted_context:
        log.warning("context cut to %d tokens of the model's %d by memory", plan.context_length, wanted_context)


def _load(
    config: EngineConfig, model: OpenModel, parts: Preparation, cache: KVCache, weights: SharedWeights
) -> TargetParts:
    """The weights, in an executor."""
    executor: StepExecutor
    team, context_length = None, parts.plan.context_length
    attention = _attention(config, model, parts.kernels, cache)
    if parts.kernels == "native":
        team = make_team(config.threads or host.usable_cores(), config.spin_us, config.cpu_cores)
        packed = weights.once("target", lambda: native_weights(config, model))
        executor = native_executor(config, model, packed, cache, context_length, team)
    elif parts.kernels == "cuda":
        on_device = weights.once("target", lambda: cuda_weights(config, model, cache.pool.device))
        executor = cuda_executor(config, model, on_device, cache, context_length, attention)
    else:
        dense = weights.once("target", lambda: model.read(cache.pool.device))
        executor = torch_executor(config, model, dense, cache, context_length, attention)
    choose_products(config.linear_backend, executor)
    if isinstance(executor, CudaExecutor):
        executor.warm_up(config.max_num_seqs, config.max_num_batched_tokens)
    return TargetParts(executor=executor, cache=cache, context_length=context_length, team=team, weights=weights)


def _scheduler(config: EngineConfig, num_blocks: int, executor: StepExecutor) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        num_lookahead_tokens=int(executor.name == "cuda"),
    )


def choose_kernels(config: EngineConfig, model: OpenModel, device: torch.device) -> Kernels:
    """Which kernels run this engine; the reason against the fast ones of the device is logged.

    Raises:
        UnsupportedError: the native ones were asked for, or fast ones are needed, and cannot.
    """
    fast: Kernels = "cuda" if device.type == "cuda" and config.backend != "native" else "native"
    against = _against_cuda if fast == "cuda" else _against_native
    reason = _wants_reference(config) or against(config, model, device)
    if reason is None:
        return fast
    if config.backend == "native" or config.quantization is not None:
        wanted = "backend native" if config.backend == "native" else f"quantization {config.quantization}"
        instead = "--backend reference" + (" without --quantization" if config.quantization is not None else "")
        raise UnsupportedError(f"{wanted} is not possible here: {reason}", hint=f"change that, or use {instead}")
    log.info("reference backend: %s", reason)
    return "reference"


def _wants_reference(config: EngineConfig) -> str | None:
    if config.backend == "reference":
        return "reference kernels were asked for"
    return "deterministic mode" if config.deterministic else None


def _against_cuda(config: EngineConfig, model: OpenModel, device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"compute capability {'.'.join(map(str, capability))} (CUDA kernels: 9.0)"
    return why_not_cuda(model.config, model.dtype, _kv_dtype(config, model)) or why_no_compiler()


def _against_native(config: EngineConfig, model: OpenModel, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"device {device.type}"
    if model.dtype not in (torch.bfloat16, torch.float32):
        return f"dtype {model.dtype}"
    if config.attention_backend in TORCH_ATTENTION:
        return f"attention {config.attention_backend} is torch's"
    return why_not_native(model.config, _kv_dtype(config, model), config.block_size)


def _attention(config: EngineConfig, model: OpenModel, kernels: Kernels, cache: KVCache) -> StepAttention | None:
    """How attention is computed, with its reason in the log; None: by what the kernels bring along."""
    if config.deterministic:
        log.info("attention: deterministic mode has its own")
        return None
    device = cache.pool.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    needs = AttentionNeeds(model=model.config, dtype=model.dtype, codec=_kv_dtype(config, model), capability=capability)
    default = (OWN, f"the {kernels} kernels bring it along")
    if kernels == "reference":
        is_capped = model.config.attention_softcap is not None
        default = ("eager", "the model caps attention scores") if is_capped else ("sdpa", "fastest that fits the model")
    return choose_attention(config.attention_backend, default, needs, cache)


def native_weights(config: EngineConfig, model: OpenModel) -> DecoderWeights[PackedMatrix]:
    """Pack the weights."""
    weights = in_one_piece(PackingReader(model.checkpoint, model.config, model.dtype, config.quantization).read())
    model.checkpoint.release()
    return weights


def native_executor(
    config: EngineConfig,
    model: OpenModel,
    weights: DecoderWeights[PackedMatrix],
    cache: KVCache,
    context_length: int,
    team: Any,
) -> NativeExecutor:
    """Record the step program."""
    options = NativeOptions(
        vocab_size=model.vocab_size,
        max_tokens=config.max_num_batched_tokens,
        max_rows=max(min(config.max_num_seqs, config.max_num_batched_tokens), PROMPT_LOGITS_ROWS),
        isa=config.isa or forced_isa(),
    )
    # From here on torch only samples. Its own threads would spin on the cores that the program's threads need.
    torch.set_num_threads(1)
    return NativeExecutor(model.config, weights, cache, context_length, options, team)


def cuda_weights(config: EngineConfig, model: OpenModel, device: torch.device) -> DecoderWeights[DeviceMatrix]:
    """Pack the weights on the device."""
    return DeviceReader(model.checkpoint, model.config, model.dtype, device, config.quantization).read()


def cuda_executor(
    config: EngineConfig,
    model: OpenModel,
    weights: DecoderWeights[DeviceMatrix],
    cache: KVCache,
    context_length: int,
    attention: StepAttention | None = None,
) -> CudaExecutor:
    """Make ready what steps on the device launch."""
    executor = CudaExecutor(
        model.config,
        weights,
        cache,
        context_length=context_length,
        vocab_size=model.vocab_size,
        device=CudaDevice(cache.pool.device, cache_dir() / KERNEL_CACHE),
    )
    if attention is not None:
        executor.attend_by(attention)
    return executor


def torch_executor(
    config: EngineConfig,
    model: OpenModel,
    weights: DecoderWeights[Linear],
    cache: KVCache,
    context_length: int,
    attention: StepAttention | None = None,
) -> TorchExecutor:
    """The reference kernels over dense weights; without `attention` theirs is used."""
    softcap = model.config.attention_softcap is not None
    backend, _ = select_backend(config.attention_backend, deterministic=config.deterministic, softcap=softcap)
    decoder = Decoder(model.config, weights, backend, context_length)
    return TorchExecutor(decoder, cache, model.vocab_size, attention)


def kv_layout(config: EngineConfig, model: OpenModel, is_native: bool, draft: LayerGroup | None = None) -> KVLayout:
    """The layout of this engine's KV rows; how keys are rotated is known only when the context length is."""
    return KVLayout(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=config.block_size,
        codec=_kv_dtype(config, model),
        arrangement="tiles" if is_native else "tokens",
        draft=draft,
        model_hash=model.checkpoint.fingerprint(),
        weights=f"{config.quantization or 'as stored'}, {str(model.dtype).removeprefix('torch.')}",
    )


def _kv_dtype(config: EngineConfig, model: OpenModel) -> str:
    return str(model.dtype).removeprefix("torch.") if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def plan_for(
    config: EngineConfig,
    model: OpenModel,
    layout: KVLayout,
    weight_bytes: int,
    device: torch.device,
    loaded_bytes: int = 0,
) -> MemoryPlan:
    """Plan against the memory that is free now; `loaded_bytes` of the weights are not taken again.

    Raises:
        MemoryBudgetError: it does not fit.
    """
    available = available_bytes(device) + loaded_bytes
    scratch = scratch_bytes(model.config) if device.type == "cuda" else 0
    memory = Room(available_bytes=available, is_own=device.type == "cuda", scratch_bytes=scratch)
    plan = plan_memory(config, model.config, layout, weight_bytes, memory)
    if plan.total_bytes > available:
        raise MemoryBudgetError(
            f"{plan.describe()}; that is {plan.total_bytes / 2**20:,.0f} MiB, {available / 2**20:,.0f} MiB are free",
            hint="lower --num-kv-blocks, --kv-cache-memory-bytes or --max-model-len, or use a smaller model",
        )
    return plan


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; on a CPU the host's or the container's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return host.memory().available_bytes
