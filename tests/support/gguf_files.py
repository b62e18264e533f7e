"""Writes tiny GGUF files as the converters do it: names, reversed shapes, permuted rope rows, shifted Gemma norms."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

TYPES = gguf.GGMLQuantizationType
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, architecture: str) -> str:
    """The GGUF name of a transformers tensor."""
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert match is not None, name
    inner = _INNER | (_GEMMA if architecture.startswith("gemma") else {})
    return f"blk.{match[1]}.{inner[match[2]]}.{match[3]}"


def permute(weight: Tensor, heads: int) -> Tensor:
    """Rows for interleaved rope, as the converter of llama.cpp orders them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def as_gguf(name: str, tensor: Tensor, architecture: str, config: Mapping[str, Any]) -> Tensor:
    """What a converter stores for a transformers tensor."""
    if architecture == "llama" and ".q_proj." in name:
        return permute(tensor, config["num_attention_heads"])
    if architecture == "llama" and ".k_proj." in name:
        return permute(tensor, config["num_key_value_heads"])
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def metadata(config: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """The entries below the architecture's name for a transformers configuration."""
    entries = {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "context_length": config["max_position_embeddings"],
    }
    if config.get("head_dim"):
        entries["attention.key_length"] = config["head_dim"]
    return entries | extra


def write(
    path: Path,
    architecture: str,
    entries: Mapping[str, Any],
    tensors: Mapping[str, tuple[Tensor, gguf.GGMLQuantizationType]],
    other: Mapping[str, Any] | None = None,
) -> Path:
    """Write a GGUF file; `entries` go below the architecture's name, `other` keys are written as they are."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**{f"{architecture}.{k}": v for k, v in entries.items()}, **(other or {})}.items():
        _add(writer, key, value)
    for name, (tensor, kind) in tensors.items():
        values = tensor.float().numpy()
        data = values.astype({TYPES.F16: np.float16}.get(kind, np.float32)) if kind in (TYPES.F32, TYPES.F16) else None
        writer.add_tensor(name, gguf.quants.quantize(values, kind) if data is None else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path, architecture: str, config: Mapping[str, Any], state: Mapping[str, Tensor], **extra: Any
) -> Path:
    """A float16 (vectors: float32) GGUF file of a transformers state dict; `extra` are more entries, `kind` another type."""
    kind = extra.pop("kind", TYPES.F16)
    tensors = {}
    for name, tensor in state.items():
        stored = as_gguf(name, tensor, architecture, config)
        tensors[gguf_name(name, architecture)] = (stored, TYPES.F32 if stored.ndim == 1 else kind)
    other = {key.removeprefix("/"): extra.pop(key) for key in [k for k in extra if k.startswith("/")]}
    tensors |= other.pop("tensors", {})
    return write(path, architecture, metadata(config, **extra), tensors, other)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: Sequence[tuple[type, Any]] = (
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    )
    next(add for kind, add in kinds if isinstance(value, kind))(key, value)


def string(text: str | bytes) -> bytes:
    """A GGUF string, for files that no writer would make."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def header(tensors: int, pairs: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    """The first 24 bytes of a file."""
    return magic + struct.pack("<IQQ", version, tensors, pairs)


def record(name: str, dimensions: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor record."""
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return string(name) + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", kind, offset)


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key-value pair."""
    return string(key) + struct.pack("<I", kind) + value


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
