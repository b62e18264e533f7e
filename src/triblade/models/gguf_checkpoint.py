"""A GGUF file as a checkpoint: Hugging Face names, conventions and configuration over quantized blocks.

Undoes what the converters to GGUF did: rows of q and k permuted for interleaved rope (architecture `llama` only), and
1 added to Gemma's norms. Knows no decoder. Dequantization is the `gguf` package's, exact in float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from numpy.typing import NDArray

from triblade.errors import UnsupportedError
from triblade.models.checkpoint import digest, sample_spans, unknown_tensor
from triblade.models.gguf_config import CONFIG_TENSORS, GGUFHeader, hf_config
from triblade.models.gguf_file import GGUFFile

_CELLS_AT_ONCE = 2**20
_PLAIN_TYPES = (Type.F32, Type.F16, Type.BF16)
_BLOCK_TYPES = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
_K_TYPES = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K)
_TYPES = frozenset((*_PLAIN_TYPES, *_BLOCK_TYPES, *_K_TYPES))
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_INNER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN_INNER: Mapping[str, dict[str, str]] = {
    "gemma2": _GEMMA_INNER,
    "gemma3": _GEMMA_INNER,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}


class GGUFCheckpoint:
    """Implements `Checkpoint` for one GGUF file.

    Raises:
        CheckpointError: from the constructor, when the file is corrupt or incomplete.
        UnsupportedError: it holds an architecture or a tensor type that is not read, or is one part of several.
    """

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    dtype = torch.bfloat16

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._architecture = self._file.metadata.get("general.architecture")
        _refuse_parts(self._file)
        _refuse_types(self._file)
        shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        self.config = hf_config(GGUFHeader(self._file.metadata, shapes, self._values))
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        self.generation_config = {name: self.config[name] for name in names if name in self.config}
        self._file.forget_metadata()
        self._stored = {self._hf_name(name): name for name in shapes if name not in CONFIG_TENSORS}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors in bfloat16."""
        sizes = (torch.Size(self._file.tensors[stored].shape).numel() for stored in self._stored.values())
        return sum(sizes) * self.dtype.itemsize

    def names(self) -> frozenset[str]:
        """Names of all tensors, as transformers spells them."""
        return frozenset(self._stored)

    def tensor(self, name: str) -> torch.Tensor:
        """A dequantized tensor, float32."""
        blocks, kind = self.raw(name)
        rows = np.atleast_2d(blocks.view(_storage(kind)))
        tensor = torch.empty(self._file.tensors[self._stored[name]].shape)
        values = tensor.view(len(rows), -1).numpy()
        step = max(1, _CELLS_AT_ONCE // values.shape[1])
        for start in range(0, len(rows), step):  # the library's temporaries are several times what it returns
            values[start : start + step] = dequantize(rows[start : start + step], kind)
        if name.endswith("norm.weight") and self._architecture in ("gemma2", "gemma3"):
            return tensor - 1.0
        return tensor

    def raw(self, name: str) -> tuple[NDArray[np.uint8], Type]:
        """The stored bytes of a tensor and their type, rows in the order of transformers.

        Returns:
            [rows, bytes per row] (one row for a vector): whole blocks, a row of the matrix each. Mapped and read-only
            where the file has the rows in that order.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._stored:
            raise unknown_tensor(name, self._file.path)
        stored = self._stored[name]
        blocks, kind = self._file.blocks(stored), self._file.tensors[stored].type
        heads = self._permuted_heads(name)
        return (blocks if heads is None else self._unpermute(blocks, kind, name, heads)), kind

    def release(self) -> None:
        """See `Checkpoint`."""
        self._file.release()

    def fingerprint(self) -> str:
        """SHA-256 over the header and samples of every tensor's bytes."""
        return digest({}, self._samples())

    def _samples(self) -> Iterator[bytes]:
        yield self._file.bytes_at(0, self._file.data_start)
        for tensor in self._file.tensors.values():
            for offset, length in sample_spans(tensor.offset, tensor.num_bytes):
                yield self._file.bytes_at(offset, length)

    def _values(self, stored: str) -> list[float]:
        kind = self._file.tensors[stored].type
        values: list[float] = dequantize(self._file.blocks(stored).view(_storage(kind)), kind).ravel().tolist()
        return values

    def _hf_name(self, stored: str) -> str:
        if stored in _OUTER:
            return _OUTER[stored]
        inner = _INNER | _OWN_INNER.get(str(self._architecture), {})
        match = _LAYER.fullmatch(stored)
        if match is None or match[2] not in inner:
            raise UnsupportedError(f"the GGUF file has a tensor that no {self._architecture} model has: {stored!r}")
        return f"model.layers.{match[1]}.{inner[match[2]]}.{match[3]}"

    def _permuted_heads(self, name: str) -> int | None:
        """Number of heads whose rows are permuted in this tensor; None: rows are in order."""
        if self._architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".self_attn.k_proj." in name else None

    def _unpermute(self, blocks: NDArray[np.uint8], kind: Type, name: str, heads: int) -> NDArray[np.uint8]:
        if name.endswith(".bias"):  # a vector is one row of bytes: its elements are the rows here
            blocks = blocks.reshape(-1, np.dtype(_storage(kind)).itemsize)
            return unpermute_rows(blocks, heads).reshape(-1)
        return unpermute_rows(blocks, heads)


def unpermute_rows(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Rows of a q or k projection in transformers' order from those for interleaved rope.

    Interleaved rope rotates elements 2i and 2i + 1 of a head, transformers' rotates elements i and i + head_dim / 2. So
    within each head the file has 0, d/2, 1, d/2 + 1, ... where transformers has 0, 1, ..., d/2, d/2 + 1, ...

    Args:
        rows: [heads * head_dim, bytes per row].
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])  # [heads, head_dim / 2, 2, bytes]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _storage(kind: Type) -> Any:
    """The numpy type that `gguf` wants the stored bytes viewed as."""
    return {Type.F32: np.float32, Type.F16: np.float16}.get(kind, np.uint8)


def _refuse_parts(file: GGUFFile) -> None:
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedError(
            f"{file.path} is one of {file.metadata['split.count']} parts of a model",
            hint="join them first: llama-gguf-split --merge FIRST_PART OUTPUT",
        )


def _refuse_types(file: GGUFFile) -> None:
    for tensor in file.tensors.values():
        if tensor.type not in _TYPES:
            hint = "types that are read: " + ", ".join(sorted(kind.name for kind in _TYPES))
            raise UnsupportedError(f"tensor {tensor.name!r} in {file.path} has type {tensor.type.name}", hint=hint)
