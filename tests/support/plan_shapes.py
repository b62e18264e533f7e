"""Shapes of models that plans are made for, as their configurations say; none of them has weights."""

from __future__ import annotations

from typing import Any

from triblade.models.config import model_config
from triblade.tune.shape import ModelShape

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
EIGHT = ModelShape(name="org/llama-8b", config=model_config(LLAMA_8B))
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
SMALL_SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMALL = ModelShape(
    name="org/small",
    config=model_config({**LLAMA_8B, **SMALL_SIZES, "vocab_size": 49152, "num_key_value_heads": 3}),
)
SEVENTY = ModelShape(name="org/llama-70b", config=model_config({**LLAMA_70B, "num_attention_heads": 64}))
