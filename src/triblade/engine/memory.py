"""How much memory a model, its KV cache and a step take, decided before anything is loaded.

Pure arithmetic over sizes in bytes; it allocates nothing. When something does not fit, the message says what is there, what is
asked for, and which option to change.
"""

from __future__ import annotations

from dataclasses import dataclass

from triblade.config import EngineConfig
from triblade.errors import ConfigError, MemoryBudgetError
from triblade.kv.layout import KVLayout
from triblade.models.config import ModelConfig

# Without an explicit size the cache holds this many full contexts, if memory does: enough for several users and their prefixes
# without taking a machine's whole memory for a small model.
DEFAULT_CONTEXTS = 8
FLOAT32_BYTES = 4
# Copies of the logits that sampling makes (processed, probabilities, integer weights and their sums in 64 bits).
LOGITS_COPIES = 5


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
    config: EngineConfig, model: ModelConfig, layout: KVLayout, weight_bytes: int, available_bytes: int
) -> MemoryPlan:
    """Decide context length and number of KV blocks.

    Raises:
        ConfigError: `max_model_len` exceeds what the model takes.
        MemoryBudgetError: weights, or one context as asked for, do not fit.
    """
    wanted = _wanted_context(config, model)
    activations = activation_bytes(config, model, weight_bytes // max(1, model.num_parameters))
    rope = sum(2 * FLOAT32_BYTES * wanted * (r.rotary_dim // 2) for r in model.ropes)
    room = int(available_bytes * config.gpu_memory_utilization) - weight_bytes - activations - rope
    blocks = _num_blocks(config, layout, wanted, room)
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


def _num_blocks(config: EngineConfig, layout: KVLayout, context: int, room_bytes: int) -> int:
    """Blocks of the pool: as told, or enough for a few full contexts within the room there is.

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
    contexts = min(DEFAULT_CONTEXTS, config.max_num_seqs)
    blocks = min(contexts * layout.blocks_for(context), room_bytes // layout.row_bytes)
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
