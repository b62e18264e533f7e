"""The memory plan: what fits, what is cut, what is refused, with numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triblade.config import EngineConfig
from triblade.engine.memory import MemoryPlan, Room, explained, plan_memory
from triblade.errors import ConfigError, MemoryBudgetError
from triblade.kv.layout import KVLayout
from triblade.models.config import model_config

HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
MODEL = model_config(HF)
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, codec="bfloat16")
WEIGHTS = MODEL.num_parameters * 2
GIB = 2**30


def plan(available: int = 20 * GIB, **options: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(model="m", **options), MODEL, LAYOUT, WEIGHTS, Room(available_bytes=available))


def test_parameters_of_a_known_model() -> None:
    assert MODEL.num_parameters == 134_515_008


def test_default_is_a_few_full_contexts() -> None:  # H09
    default = plan()
    assert default.context_length == 8192
    assert default.num_kv_blocks == 8 * 512
    assert default.kv_bytes == 8 * 8192 * 23_040
    assert (
        default.total_bytes == default.weight_bytes + default.kv_bytes + default.activation_bytes + default.rope_bytes
    )


def test_a_device_of_its_own_is_used() -> None:
    """As many contexts as may run, what kernels need aside; no more than there is room for."""
    options = EngineConfig(model="m", max_num_seqs=32)
    memory = Room(available_bytes=20 * GIB, is_own=True, scratch_bytes=GIB)
    whole = plan_memory(options, MODEL, LAYOUT, WEIGHTS, memory)
    assert whole.num_kv_blocks == 32 * 512
    assert whole.activation_bytes == plan(max_num_seqs=32).activation_bytes + GIB
    small = plan_memory(options, MODEL, LAYOUT, WEIGHTS, Room(available_bytes=4 * GIB, is_own=True, scratch_bytes=GIB))
    assert 0.89 * 4 * GIB < small.total_bytes <= 0.9 * 4 * GIB


def test_running_out_of_memory_says_what_to_change() -> None:
    told = "CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of"
    with (
        pytest.raises(
            MemoryBudgetError, match=r"^cpu ran out of memory while loading m \(1.20 GiB wanted\)\nhint: do less$"
        ),
        explained("loading m", torch.device("cpu"), "do less"),
    ):
        raise torch.OutOfMemoryError(told)


def test_less_memory_gives_fewer_blocks_within_the_share() -> None:
    small = plan(available=GIB, gpu_memory_utilization=0.8)
    assert small.total_bytes <= 0.8 * GIB
    assert 512 <= small.num_kv_blocks < 8 * 512


def test_context_is_cut_to_what_fits_unless_asked_for() -> None:  # E8
    available = WEIGHTS + 200 * 2**20
    cut = plan(available=available)
    assert cut.context_length == cut.num_kv_blocks * 16 < 8192
    with pytest.raises(MemoryBudgetError, match=r"8192 tokens needs 180 MiB.*room for \d+ MiB"):
        plan(available=available, max_model_len=8192)


def test_longer_than_the_model_is_refused_with_the_number() -> None:  # A17
    with pytest.raises(ConfigError, match="max_model_len 9000 exceeds the model's context length: 8192"):
        plan(max_model_len=9000)


def test_explicit_sizes_are_obeyed() -> None:  # H09
    assert plan(num_kv_blocks=77, max_model_len=1024).num_kv_blocks == 77
    assert plan(kv_cache_memory_bytes=LAYOUT.row_bytes * 100 + 5, max_model_len=1600).num_kv_blocks == 100
    with pytest.raises(MemoryBudgetError):
        plan(num_kv_blocks=10, max_model_len=1024)
    with pytest.raises(ConfigError, match=rf"kv_cache_memory_bytes must be at least {LAYOUT.row_bytes} .*, got: 5"):
        plan(kv_cache_memory_bytes=5)


def test_weights_alone_too_large() -> None:
    with pytest.raises(MemoryBudgetError, match="no room for a KV cache"):
        plan(available=WEIGHTS)


def test_description_names_every_part() -> None:
    text = plan().describe()
    for part in ("weights 257 MiB", "KV cache 1,440 MiB", "context 8192 tokens", "4096 KV blocks"):
        assert part in text
