"""Qwen2, Qwen2.5 (bias on q, k, v) and Qwen3 (norms on q and k instead)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triblade.models.config import LayerConfig, ModelConfig, common, layer_types, windowed


def qwen2(hf: Mapping[str, Any]) -> ModelConfig:
    """Qwen2ForCausalLM."""
    return common(hf, qkv_bias=True, layers=_layers(hf))


def qwen3(hf: Mapping[str, Any]) -> ModelConfig:
    """Qwen3ForCausalLM."""
    bias = bool(hf.get("attention_bias", False))
    return common(hf, qk_norm=True, qkv_bias=bias, output_bias=bias, layers=_layers(hf))


def _layers(hf: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    """Windowed from layer `max_window_layers` on, and only if `use_sliding_window` says so."""
    first = int(hf.get("max_window_layers", 28))
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    return windowed(layer_types(hf, [i >= first for i in range(int(hf["num_hidden_layers"]))]), window)
