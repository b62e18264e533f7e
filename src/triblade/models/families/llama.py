"""Llama 1 to 3, SmolLM2, and Mistral: the plain decoder; Mistral adds one window for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triblade.models.config import ModelConfig, common, layer_types, windowed


def llama(hf: Mapping[str, Any]) -> ModelConfig:
    """LlamaForCausalLM."""
    bias = bool(hf.get("attention_bias", False))
    return common(hf, qkv_bias=bias, output_bias=bias, mlp_bias=bool(hf.get("mlp_bias", False)))


def mistral(hf: Mapping[str, Any]) -> ModelConfig:
    """MistralForCausalLM."""
    window = hf.get("sliding_window")
    return common(hf, layers=windowed(layer_types(hf, [True] * int(hf["num_hidden_layers"])), window))
