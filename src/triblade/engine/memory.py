"""How much memory a model, its KV cache and a step take, decided before anything is loaded.

Pure arithmetic over sizes in bytes; it allocates nothing. When something does not fit, the message says what is there, what is
asked for, and which option to change; `explained` says it where memory ran out all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from triblade.config import EngineConfig
from triblade.errors import ConfigError, MemoryBudgetError
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig

# Without an explicit size a cache in main memory holds this many full contexts: enough for several users and their prefixes without
# taking a machine's whole memory for a small model. On a GPU it holds one for every request that may run.
DEFAULT_CONTEXTS = 8
FLOAT32_BYTES = 4
# Copies of the logits that sampling makes (processed, probabilities, integer weights and their sums in 64 bits).
LOGITS_COPIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that an engine may plan with.

    Attributes:
        available_bytes: free now.
        is_own: the memory of a GPU, which nobody else waits for: the cache takes what it can use.
        scratch_bytes: what kernels need besides a step's activations.
    """

    available_bytes: int
    is_own: bool = False
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What an engine will take."""

    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    rope_bytes: int
    num_kv_blocks: int
    context_length: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.rope_bytes

    def describe(self) -> str:
        """One line for the log."""
        parts = (("weights", self.weight_bytes), ("KV cache", self.kv_bytes), ("activations", self.activation_bytes))
        sizes = ", ".join(f"{name} {mebibytes(size)}" for name, size in parts)
        return f"memory: {sizes}; context {self.context_length} tokens, {self.num_kv_blocks} KV blocks"


def plan_memory(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, weight_bytes: int, memory: Room
) -> MemoryPlan:
    """Decide context length and number of KV blocks.

    Raises:
        ConfigError: `max_model_len` exceeds what the model takes.
        MemoryBudgetError: weights, or one context as asked for, do not fit.
    """
    wanted = _wanted_context(config, model)
    activations = activation_bytes(config, model, weight_bytes // max(1, model.num_parameters)) + memory.scratch_bytes
    rope = sum(2 * FLOAT32_BYTES * wanted * (r.rotary_dim // 2) for r in model.ropes)
    room = int(memory.available_bytes * config.gpu_memory_utilization) - weight_bytes - activations - rope
    contexts = config.max_num_seqs if memory.is_own else min(DEFAULT_CONTEXTS, config.max_num_seqs)
    blocks = _num_blocks(config, layout, contexts * layout.blocks_for(wanted), room)
    capacity = blocks * layout.block_size
    if capacity < wanted and config.max_model_len is not None:
        raise MemoryBudgetError(
            f"a context of {wanted} tokens needs {mebibytes(layout.blocks_for(wanted) * layout.row_bytes)} of KV cache, "
            f"there is room for {mebibytes(blocks * layout.row_bytes)} ({capacity} tokens)",
            hint="lower --max-model-len, use --kv-cache-dtype int8, or give more memory",
        )
    return MemoryPlan(
        weight_bytes=weight_bytes,
        kv_bytes=blocks * layout.row_bytes,
        activation_bytes=activations,
        rope_bytes=rope,
        num_kv_blocks=blocks,
        context_length=min(wanted, capacity),
    )


def activation_bytes(config: EngineConfig, model: ModelConfig, bytes_per_parameter: int) -> int:
    """The largest step's temporaries: one layer's inputs and outputs for all tokens, and the logits of all sequences.

    Activations are taken to be as wide as the weights, but for rounded ones: never under 2 bytes.
    """
    widths = 4 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size) + 3 * model.intermediate_size
    tokens = config.max_num_batched_tokens * widths * max(bytes_per_parameter, 2)
    logits = min(config.max_num_seqs, config.max_num_batched_tokens) * model.vocab_size * FLOAT32_BYTES * LOGITS_COPIES
    return tokens + logits


def _wanted_context(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.context_length
    if config.max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's context length: {model.context_length}",
            hint=f"use at most --max-model-len {model.context_length}",
        )
    return config.max_model_len


def _num_blocks(config: EngineConfig, layout: KVLayout, useful: int, room_bytes: int) -> int:
    """Blocks of the pool: as told, or as many as are useful within the room there is.

    Raises:
        ConfigError: the memory asked for does not hold a block.
        MemoryBudgetError: the room there is does not.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if (told_bytes := config.kv_cache_memory_bytes) is not None:
        if told_bytes < layout.row_bytes:
            needed = f"at least {layout.row_bytes} (one block)"
            raise ConfigError(
                f"kv_cache_memory_bytes must be {needed}, got: {told_bytes}", param="kv_cache_memory_bytes"
            )
        return told_bytes // layout.row_bytes
    blocks = min(useful, room_bytes // layout.row_bytes)
    if blocks < 1:
        raise MemoryBudgetError(
            f"no room for a KV cache: one block takes {layout.row_bytes} bytes, {max(room_bytes, 0)} are left "
            "after weights and activations",
            hint="use a smaller model or --dtype bfloat16, or raise --gpu-memory-utilization",
        )
    return blocks


def mebibytes(size: int) -> str:
    """A size for people."""
    return f"{size / 2**20:,.0f} MiB"


@contextmanager
def explained(doing: str, device: torch.device, hint: str) -> Iterator[None]:
    """What to change where memory of a device runs out.

    Raises:
        MemoryBudgetError: it did while `doing`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        state = ""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            own = torch.cuda.memory_reserved(device)
            state = f"; {mebibytes(free)} of {mebibytes(total)} are free, {mebibytes(own)} are this engine's"
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        size = f" ({wanted[1]} wanted)" if wanted else ""
        raise MemoryBudgetError(f"{device} ran out of memory while {doing}{size}{state}", hint=hint) from error
