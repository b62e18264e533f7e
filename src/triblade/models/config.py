"""What a decoder is, as numbers: the one description that the decoder, the loader, the KV layout and the planner share.

Made from a Hugging Face `config.json` by a family (see `families/`); every key that bears a shape is explicit here. Knows no
tensor. Two spellings of the same fact (old and new rope keys, window patterns and layer types) are one fact after this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triblade.errors import CheckpointError, UnsupportedError
from triblade.registry import MODELS

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh"]

_ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
    "su": "longrope",  # Phi-3's first name for it
}
# Settings of some kinds, under the names that RopeConfig has for them.
_ROPE_NUMBERS: tuple[str, ...] = ("attention_factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_ROPE_NUMBERS += ("mscale", "mscale_all_dim")
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a group of layers; `original_context` is the length the model was first trained for."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What differs between the layers of one model."""

    window: int | None = None  # a query sees itself and the `window - 1` tokens before it; None: everything
    rope: int = 0  # index into ModelConfig.ropes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with gated feed-forward and rotary positions."""

    architecture: str
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's length
    hidden_size: int
    intermediate_size: int
    num_layers: int
    skipped_layers: int = 0  # that the checkpoint has behind these: a draft may be the first layers of its target
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    activation: Activation = "silu"
    attention_scale: float
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # Gemma stores w and multiplies by 1 + w
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma normalises the output of attention and feed-forward as well
    fused_projections: bool = False  # Phi-3 stores qkv_proj and gate_up_proj
    trained_in_bfloat16_range: bool = False  # activations exceed float16's 65504

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the matrices and norms; the tied head counts once."""
        attention = self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size
        layer = (
            attention + 3 * self.hidden_size * self.intermediate_size + (4 if self.post_norms else 2) * self.hidden_size
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a Hugging Face configuration through the family its `architectures` names.

    Raises:
        ConfigError: no family of that name (the message lists those there are).
        CheckpointError: a key that bears a shape is missing or makes no sense.
    """
    architectures = hf.get("architectures") or ()
    if not architectures:
        raise CheckpointError("config.json names no architecture", hint=f"known: {', '.join(MODELS)}")
    family = MODELS[architectures[0]]
    try:
        config: ModelConfig = family(hf)
    except KeyError as error:
        raise CheckpointError(f"config.json of {architectures[0]} lacks the key {error}") from error
    _check(config)
    return config


def common(hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """The fields that all families read the same way; `overrides` are a family's own."""
    heads = int(hf["num_attention_heads"])
    head_dim = int(hf.get("head_dim") or hf["hidden_size"] // heads)
    num_layers = int(hf["num_hidden_layers"])
    rope = rope_config(hf, rope_parameters(hf), head_dim)
    fields: dict[str, Any] = {
        "architecture": hf["architectures"][0],
        "vocab_size": int(hf["vocab_size"]),
        "hidden_size": int(hf["hidden_size"]),
        "intermediate_size": int(hf["intermediate_size"]),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": int(hf.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
        "context_length": context_length(hf, rope),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "layers": tuple(LayerConfig() for _ in range(num_layers)),
        "ropes": (rope,),
        "attention_scale": head_dim**-0.5,
        "activation": activation(hf.get("hidden_activation") or hf.get("hidden_act") or "silu"),
    }
    return ModelConfig(**{**fields, **overrides})


def activation(name: str) -> Activation:
    """Our name for a feed-forward activation.

    Raises:
        UnsupportedError: there is none.
    """
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"unknown activation: {name!r}", hint=f"known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope_parameters(hf: Mapping[str, Any], layer_type: str | None = None) -> Mapping[str, Any]:
    """The rope settings, from `rope_parameters` (new) or `rope_scaling` and `rope_theta` (old), per layer type if given so."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if layer_type is not None and isinstance(scaling.get(layer_type), Mapping):
        scaling = scaling[layer_type]
    return {"rope_theta": hf.get("rope_theta"), **scaling}


def rope_config(hf: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """One RopeConfig from its settings; `type` and `rope_type` are the same key, `rope_type` wins.

    Raises:
        UnsupportedError: a kind of scaling that is not known.
    """
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if name not in _ROPE_KINDS:
        raise UnsupportedError(f"unknown rope type: {name!r}", hint=f"known: {', '.join(_ROPE_KINDS)}")
    kind = _ROPE_KINDS[name]
    stated = int(hf["max_position_embeddings"])
    original = int(
        parameters.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings") or stated
    )
    partial = parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    numbers = {key: float(parameters[key]) for key in _ROPE_NUMBERS if parameters.get(key) is not None}
    return RopeConfig(
        kind=kind,
        theta=float(parameters.get("rope_theta") or 10000.0),
        rotary_dim=int(head_dim * partial),
        factor=float(parameters.get("factor") or stated / original),
        original_context=original,
        truncate=bool(parameters.get("truncate", True)),
        short_factor=tuple(map(float, parameters.get("short_factor") or ())),
        long_factor=tuple(map(float, parameters.get("long_factor") or ())),
        **numbers,
    )


def context_length(hf: Mapping[str, Any], rope: RopeConfig) -> int:
    """Tokens the model takes: linear and dynamic scaling stretch the stated length, every other kind states the final one."""
    stated = int(hf["max_position_embeddings"])
    return int(stated * rope.factor) if rope.kind in ("linear", "dynamic") else stated


def layer_types(hf: Mapping[str, Any], is_local: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers are local (windowed): the explicit `layer_types` win over a family's pattern.

    Raises:
        CheckpointError: there are not as many entries as layers.
        UnsupportedError: an entry is not known.
    """
    explicit = hf.get("layer_types")
    if explicit is None:
        return tuple(is_local)
    if len(explicit) != int(hf["num_hidden_layers"]):
        raise CheckpointError(f"layer_types has {len(explicit)} entries for {hf['num_hidden_layers']} layers")
    known = {"sliding_attention": True, "full_attention": False}
    for name in explicit:
        if name not in known:
            raise UnsupportedError(f"unknown layer type: {name!r}", hint=f"known: {', '.join(known)}")
    return tuple(known[name] for name in explicit)


def windowed(local: Sequence[bool], window: int | None) -> tuple[LayerConfig, ...]:
    """Layers of which the local ones see only `window` tokens."""
    return tuple(LayerConfig(window=window if is_local else None) for is_local in local)


def _check(config: ModelConfig) -> None:
    """Refuse shapes that cannot be a decoder, naming the numbers."""
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{config.num_heads} query heads are not divisible by {config.num_kv_heads} key-value heads"
        )
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.head_dim)
    if min(*sizes, config.context_length) < 1:
        raise CheckpointError(f"a size in config.json is below 1: {config}")
    for rope in config.ropes:
        if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= config.head_dim:
            raise CheckpointError(f"rope rotates {rope.rotary_dim} of {config.head_dim} head dimensions")
        if rope.kind == "longrope" and {len(rope.short_factor), len(rope.long_factor)} != {rope.rotary_dim // 2}:
            raise CheckpointError(
                f"longrope needs {rope.rotary_dim // 2} factors, got: {len(rope.short_factor)} short, {len(rope.long_factor)} long"
            )
