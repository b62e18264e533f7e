"""Gemma 2 (soft caps, every other layer local) and Gemma 3 (q/k norms, five local layers to a global one, two ropes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triblade.models.config import LayerConfig, ModelConfig, common, layer_types, rope_config, rope_parameters, windowed

GEMMA3_LOCAL_THETA = 10000.0
GEMMA3_GLOBAL_THETA = 1000000.0


def gemma2(hf: Mapping[str, Any]) -> ModelConfig:
    """Gemma2ForCausalLM."""
    local = layer_types(hf, [i % 2 == 0 for i in range(int(hf["num_hidden_layers"]))])
    return common(
        hf,
        **_gemma(hf),
        layers=windowed(local, hf.get("sliding_window", 4096)),
        attention_softcap=hf.get("attn_logit_softcapping", 50.0),
        logits_softcap=hf.get("final_logit_softcapping", 30.0),
    )


def gemma3(hf: Mapping[str, Any]) -> ModelConfig:
    """Gemma3ForCausalLM; `rope_scaling` concerns the global layers only, and the stated length is final."""
    pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6)
    local = layer_types(hf, [(i + 1) % pattern != 0 for i in range(int(hf["num_hidden_layers"]))])
    window = hf.get("sliding_window", 4096)
    head_dim = int(hf.get("head_dim", 256))
    stretched = rope_parameters(hf, "full_attention")
    plain = rope_parameters({**hf, "rope_scaling": None}, "sliding_attention")
    ropes = (
        rope_config(hf, {**stretched, "rope_theta": stretched["rope_theta"] or GEMMA3_GLOBAL_THETA}, head_dim),
        rope_config(hf, {**plain, "rope_theta": _local_theta(hf)}, head_dim),
    )
    return common(
        hf,
        **_gemma(hf),
        qk_norm=True,
        layers=tuple(LayerConfig(window=window if is_local else None, rope=int(is_local)) for is_local in local),
        ropes=ropes,
        context_length=int(hf["max_position_embeddings"]),
        attention_softcap=hf.get("attn_logit_softcapping"),
        logits_softcap=hf.get("final_logit_softcapping"),
    )


def _local_theta(hf: Mapping[str, Any]) -> float:
    """The base of the local layers, in the new spelling or the old one."""
    parameters = (hf.get("rope_parameters") or {}).get("sliding_attention") or {}
    return float(parameters.get("rope_theta") or hf.get("rope_local_base_freq") or GEMMA3_LOCAL_THETA)


def _gemma(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What both generations share: tied embeddings by default, norms around every block, scaled embeddings."""
    bias = bool(hf.get("attention_bias", False))
    head_dim = int(hf.get("head_dim", 256))
    return {
        "head_dim": head_dim,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", True)),
        "attention_scale": float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
        "activation": "gelu_tanh",
        "embedding_scale": float(hf["hidden_size"]) ** 0.5,
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "output_bias": bias,
        "post_norms": True,
        "trained_in_bfloat16_range": True,
    }
