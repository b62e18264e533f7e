"""Phi-3, Phi-3.5 and Phi-4: fused projections on disk, longrope, optionally a window and a partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triblade.models.config import ModelConfig, common, windowed


def phi3(hf: Mapping[str, Any]) -> ModelConfig:
    """Phi3ForCausalLM."""
    layers = windowed([True] * int(hf["num_hidden_layers"]), hf.get("sliding_window"))
    return common(hf, fused_projections=True, layers=layers)
