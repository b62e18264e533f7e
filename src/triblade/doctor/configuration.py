"""A configuration before it is started: does it fit the memory, which kernels will run it, and what would fit instead.

Loads no weights. Symptoms are those of `symptoms`, before they happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from triblade import host
from triblade.config import EngineConfig, to_flags
from triblade.doctor.symptoms import Finding
from triblade.engine.build import prepare
from triblade.errors import MemoryBudgetError, TribladeError
from triblade.models.loader import OpenModel, open_model
from triblade.ops.select import select_device

SHORTER = (8192, 4096, 2048, 1024)


def examine(config: EngineConfig) -> list[Finding]:
    """What would go wrong.

    Raises:
        TribladeError: the model cannot be opened at all, with what to do.
    """
    model = open_model(config)
    device, _ = select_device(config.device)
    try:
        parts = prepare(config, model, device)
    except MemoryBudgetError as error:
        return [_out_of_memory(config, model, device, error)]
    return [*_slow(config, parts.kernels, device), *_cut(config, model, parts.plan.context_length), *_coarse(config)]


def _out_of_memory(config: EngineConfig, model: OpenModel, device: torch.device, error: MemoryBudgetError) -> Finding:
    """The first change that fits, by trying; changes that lose nothing come first."""
    remedy = "a smaller model, fewer bits (triblade convert), or more memory"
    for changed in _smaller(config, model.config.context_length):
        try:
            prepare(changed, model, device)
        except TribladeError:
            continue
        flags = " ".join(flag for flag in to_flags(changed) if flag not in to_flags(config))
        remedy = f"this fits: {flags}"
        break
    return Finding(
        symptom="out of memory at load",
        evidence=error.message,
        cause="weights and KV cache need more than is free",
        remedy=remedy,
    )


def _smaller(config: EngineConfig, context_length: int) -> Iterator[EngineConfig]:
    lengths = [length for length in SHORTER if length < (config.max_model_len or context_length)]
    for kept in (
        config,
        replace(config, kv_cache_dtype="int8"),
        replace(config, kv_cache_dtype="int8", quantization="int4"),
    ):
        if kept is not config:
            yield kept
        yield from (
            replace(kept, max_model_len=length, num_kv_blocks=None, kv_cache_memory_bytes=None) for length in lengths
        )


def _slow(config: EngineConfig, kernels: str, device: torch.device) -> Iterator[Finding]:
    if kernels == "reference":
        yield Finding(
            symptom="slow",
            evidence=f"the reference kernels would run this on {device.type}",
            cause="an option or the model rules the fast kernels out; the log of `serve` names it",
            remedy="leave out --backend reference, --deterministic, --dtype float32; on a CPU build the kernels: make native",
        )
    if device.type == "cpu" and config.threads is not None and config.threads > host.usable_cores():
        yield Finding(
            symptom="slow",
            evidence=f"--threads {config.threads}, {host.usable_cores()} cores may be used",
            cause="threads wait for each other's core at every step",
            remedy="leave --threads out",
        )


def _cut(config: EngineConfig, model: OpenModel, context_length: int) -> Iterator[Finding]:
    wanted = config.max_model_len or model.config.context_length
    if context_length < wanted:
        yield Finding(
            symptom="crash on long text",
            evidence=f"memory holds {context_length} tokens of KV cache, the model could take {wanted}",
            cause="longer prompts will be refused",
            remedy="--kv-cache-dtype int8 doubles what fits; or give the cache more with --kv-cache-memory-bytes",
        )


def _coarse(config: EngineConfig) -> Iterator[Finding]:
    if config.quantization == "int4":
        yield Finding(
            symptom="quality drop",
            evidence="--quantization int4 rounds to nearest while loading",
            cause="four bits without calibration",
            remedy="triblade convert MODEL --calibration YOUR_TEXT, and serve what it made; triblade eval measures",
        )
