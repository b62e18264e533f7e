"""The metadata of a GGUF file as a Hugging Face configuration.

GGUF names the same facts differently, leaves out what its reference runtime hard-codes per architecture, and stores
some of them as tensors (rope factors). Everything is explicit in the result, so that no default is taken twice. Knows
no weights: of the tensors only shapes, and the values of the few that are configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triblade.errors import CheckpointError, UnsupportedError

# Tensors that are configuration and not weights.
ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
CONFIG_TENSORS = frozenset((ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT))

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# Models that scale attention by hidden / heads and not by head_dim (27B of both), by their layers: files do not say so.
_SCALED_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}
_LLAMA3_CONTEXT, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


@dataclass(frozen=True)
class GGUFHeader:
    """What the configuration is made from: metadata, shapes of all tensors, and values of the small ones."""

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    values: Callable[[str], list[float]]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """An entry below the architecture's name; of a list (one value per layer) the value.

        Raises:
            UnsupportedError: the values of a list differ.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(f"{self.architecture}.{key} differs between layers: {value!r:.80}")
            return value[0]
        return value

    def need(self, key: str) -> Any:
        """Like `get`, for an entry without which there is no model.

        Raises:
            CheckpointError: it is missing or no positive number.
        """
        value = self.get(key)
        if not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(
                f"{self.architecture}.{key} in the GGUF file must be a positive number: {value!r:.80}"
            )
        return value


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """The configuration in the form of config.json.

    Raises:
        UnsupportedError: an architecture or a feature that is not read.
        CheckpointError: an entry is missing or makes no sense.
    """
    if header.architecture not in _CLASSES:
        known = ", ".join(sorted(_CLASSES))
        raise UnsupportedError(f"unknown GGUF architecture: {header.architecture!r}", hint=f"known: {known}")
    if header.get("expert_count", 0):
        raise UnsupportedError("mixture-of-experts GGUF files are not read", hint="use a dense model")
    own = {"phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3}.get(header.architecture, _plain)
    config = {**_common(header), **_rope(header), **_token_ids(header.metadata), **own(header)}
    return {key: value for key, value in config.items() if value is not None}


def _common(header: GGUFHeader) -> dict[str, Any]:
    heads = header.need("attention.head_count")
    return {
        "architectures": [_CLASSES[header.architecture]],
        "model_type": header.architecture,
        "hidden_size": header.need("embedding_length"),
        "intermediate_size": header.need("feed_forward_length"),
        "num_hidden_layers": header.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": _head_dim(header),
        "rms_norm_eps": header.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.need("context_length"),
        "vocab_size": _rows(header, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "dtype": "bfloat16",
    }


def _head_dim(header: GGUFHeader) -> int:
    """`attention.key_length` wins over hidden size / heads."""
    stated = header.get("attention.key_length")
    return int(stated or header.need("embedding_length") // header.need("attention.head_count"))


def _rows(header: GGUFHeader, name: str) -> int:
    if name not in header.shapes:
        raise CheckpointError(f"the GGUF file has no tensor {name!r}", hint="is it an adapter, or a part of a model?")
    return header.shapes[name][0]


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}


def _plain(header: GGUFHeader) -> dict[str, Any]:
    """Llama, Mistral (which shares its name in GGUF; a window gives it away) and Qwen."""
    config: dict[str, Any] = {"hidden_act": "silu"}
    config["attention_bias"] = "blk.0.attn_q.bias" in header.shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.shapes
    if header.architecture == "llama" and (window := header.get("attention.sliding_window")):
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def _phi3(header: GGUFHeader) -> dict[str, Any]:
    # Some files state a window of 0 for "none".
    return {"hidden_act": "silu", "sliding_window": header.get("attention.sliding_window") or None}


def _gemma2(header: GGUFHeader) -> dict[str, Any]:
    return {
        **_gemma(header, pattern=2),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
    }


def _gemma3(header: GGUFHeader) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",  # "gemma3" is the one with pictures
        **_gemma(header, pattern=6),
        "attn_logit_softcapping": header.get("attn_logit_softcapping"),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "rope_theta": header.get("rope.freq_base", 1e6),
        "rope_local_base_freq": header.get("rope.freq_base_swa", 1e4),
    }


def _gemma(header: GGUFHeader, pattern: int) -> dict[str, Any]:
    """Every `pattern`-th layer attends to everything, the others within the window."""
    layers = header.need("block_count")
    pattern = header.get("attention.sliding_window_pattern", pattern)
    heads, hidden = header.need("attention.head_count"), header.need("embedding_length")
    by_hidden = (header.architecture, layers) in _SCALED_BY_HIDDEN
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": header.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        "query_pre_attn_scalar": hidden // heads if by_hidden else header.need("attention.key_length"),
    }


def _rope(header: GGUFHeader) -> dict[str, Any]:
    head_dim = _head_dim(header)
    rotary = header.get("rope.dimension_count", head_dim)
    original = header.get("rope.scaling.original_context_length")
    return {
        "rope_theta": header.get("rope.freq_base", 1e4),
        "partial_rotary_factor": rotary / head_dim if rotary != head_dim else None,
        "original_max_position_embeddings": original if ROPE_LONG in header.shapes else None,
        "rope_scaling": _rope_scaling(header, original),
    }


def _rope_scaling(header: GGUFHeader, original: int | None) -> dict[str, Any] | None:
    if ROPE_LONG in header.shapes:
        magnitude = header.get("rope.scaling.attn_factor")
        factors = {"short_factor": header.values(ROPE_SHORT), "long_factor": header.values(ROPE_LONG)}
        return {"rope_type": "longrope", **factors, **({} if magnitude is None else {"attention_factor": magnitude})}
    if ROPE_FREQUENCIES in header.shapes:
        return _from_frequency_factors(header)
    kind = header.get("rope.scaling.type") or ("linear" if header.get("rope.scale_linear", 1.0) != 1.0 else "none")
    if kind == "none":
        return None
    factor = header.get("rope.scaling.factor") or header.get("rope.scale_linear")
    if kind not in ("linear", "yarn") or not factor:
        raise UnsupportedError(f"unknown rope scaling in the GGUF file: {kind!r} with factor {factor!r}")
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _from_frequency_factors(header: GGUFHeader) -> dict[str, Any]:
    """Llama 3.1 scaling is stored as what it does: the divisor of every frequency. The largest one is the scale itself.

    When the published constants reproduce the divisors, the configuration says so; otherwise it lists them, as a
    longrope with equal short and long factors that leaves magnitudes alone.
    """
    factors = header.values(ROPE_FREQUENCIES)
    scale = float(f"{max(factors):.6g}")  # without the rounding of float32
    expected = llama3_factors(scale, header.get("rope.freq_base", 1e4), 2 * len(factors))
    if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": scale,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}


def llama3_factors(scale: float, theta: float, rotary_dim: int) -> list[float]:
    """Divisors of the rope frequencies since Llama 3.1: 1 for fast dimensions, `scale` for slow ones, or between."""
    factors = []
    for i in range(0, rotary_dim, 2):
        turns = _LLAMA3_CONTEXT / (2 * math.pi * theta ** (i / rotary_dim))  # rotations within the original context
        blend = min(max((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0), 1.0)
        factors.append(1 / (blend + (1 - blend) / scale))
    return factors
