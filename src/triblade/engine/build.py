"""From an `EngineConfig` to a ready engine: open, plan memory, load, wire.

The only place that knows all parts of an engine at once. Everything it decides for the user is logged with its reason.
"""

from __future__ import annotations

import logging
import time

import torch

from triblade import host
from triblade.config import EngineConfig
from triblade.engine.block_pool import BlockPool
from triblade.engine.engine import Engine
from triblade.engine.memory import MemoryPlan, plan_memory
from triblade.engine.runner import ModelRunner
from triblade.engine.scheduler import Scheduler
from triblade.errors import MemoryBudgetError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_backend, select_device
from triblade.spec.sampler import Sampler

log = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> Engine:
    """Load a model and make an engine of it.

    Raises:
        TribladeError: with what is wrong and what to do, before memory is taken where that can be known.
    """
    device, reason = select_device(config.device)
    log.info("device %s: %s", device, reason)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or host.usable_cores())
    model = open_model(config)
    return assemble(config, model, device)


def assemble(config: EngineConfig, model: OpenModel, device: torch.device) -> Engine:
    """Wire an engine around an opened model."""
    layout = kv_layout(config, model)
    plan = plan_for(config, model, layout, device)
    log.info("%s", plan.describe())
    if plan.context_length < (config.max_model_len or model.config.context_length):
        log.warning(
            "context cut to %d tokens of the model's %d by memory", plan.context_length, model.config.context_length
        )
    backend, reason = select_backend(
        config.attention_backend,
        deterministic=config.deterministic,
        softcap=model.config.attention_softcap is not None,
    )
    log.info("backend %s, %s", backend.name, reason)
    start = time.monotonic()
    decoder = model.load(plan.context_length, backend, device)
    log.info("loaded %s in %.1f s", model.name, time.monotonic() - start)
    cache = KVCache(layout, plan.num_kv_blocks, model.dtype, device)
    scheduler = Scheduler(
        BlockPool(plan.num_kv_blocks),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return Engine(
        model,
        ModelRunner(decoder, cache, Sampler(model.vocab_size)),
        scheduler,
        context_length=plan.context_length,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )


def kv_layout(config: EngineConfig, model: OpenModel) -> KVLayout:
    """The layout of this engine's KV rows."""
    codec = str(model.dtype).removeprefix("torch.") if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return KVLayout(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=config.block_size,
        codec=codec,
        model_hash=model.checkpoint.fingerprint(),
        rope=repr(model.config.ropes),
    )


def plan_for(config: EngineConfig, model: OpenModel, layout: KVLayout, device: torch.device) -> MemoryPlan:
    """Plan against the memory that is free now.

    Raises:
        MemoryBudgetError: it does not fit.
    """
    available = available_bytes(device)
    plan = plan_memory(config, model.config, layout, model.weight_bytes, available)
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
