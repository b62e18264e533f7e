"""Tiny random models of every family, made by transformers: the oracle's side of the model tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

WINDOW = 8
PROMPT_TOKENS = 3 * WINDOW + 1

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
}
# name -> (transformers class prefix, config overrides)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("Llama", {"head_dim": 20}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": (
        "Llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": PROMPT_TOKENS - 5},
    ),
    "llama-yarn": ("Llama", {"rope_scaling": YARN}),
    "llama-llama3": ("Llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2-window-off": ("Qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}),
    # A20: a window is given, but every layer says it attends fully.
    "qwen2-layer-types": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["full_attention"] * 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),  # A07: heads * head_dim is not the hidden size
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3-longrope-short": ("Phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 48}),
    "phi3-longrope-long": ("Phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3-partial": ("Phi3", {"partial_rotary_factor": 0.5}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 7}),
    "gemma3-pattern": (
        "Gemma3Text",
        {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 2},
    ),
    "gemma3-scaled": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 7,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}
_MODEL_CLASS = {"Gemma3Text": "Gemma3ForCausalLM"}


@dataclass(frozen=True)
class StateDictSource:
    """A checkpoint that lives in a dictionary."""

    tensors: dict[str, Tensor]

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True)
class TinyModel:
    """A transformers model and what our loader sees of it."""

    oracle: Any
    hf_config: dict[str, Any]
    source: StateDictSource

    @torch.inference_mode()
    def oracle_logits(self, ids: list[int]) -> Tensor:
        """[T, V] float32."""
        logits: Tensor = self.oracle(torch.tensor([ids])).logits[0]
        return logits


def tiny_model(name: str, seed: int = 0, **overrides: Any) -> TinyModel:
    """A random model in which every parameter matters (norms and biases are random, too)."""
    prefix, own = FAMILIES[name]
    config_class = getattr(transformers, f"{prefix}Config")
    model_class = getattr(transformers, _MODEL_CLASS.get(prefix, f"{prefix}ForCausalLM"))
    torch.manual_seed(seed)
    config = config_class(**{**BASE, **own, **overrides}, attn_implementation="eager")
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * spread)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return TinyModel(model, {**config.to_dict(), "architectures": [model_class.__name__]}, StateDictSource(state))


def prompt(length: int, seed: int = 0, vocab_size: int = BASE["vocab_size"]) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def prompts_of(lengths: Iterable[int]) -> list[list[int]]:
    """A prompt of each length."""
    return [prompt(length, seed=length) for length in lengths]
