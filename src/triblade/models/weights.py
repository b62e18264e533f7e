"""From a checkpoint's tensors to the decoder's weights: merged projections, folded norm offsets, tied heads, strict completeness.

Every parameter the configuration implies is read once and checked for its shape; a tensor of the checkpoint that nobody asked
for is an error too, unless it is known to carry no weight. Knows no file format: a checkpoint answers names with tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from triblade.errors import CheckpointError
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights, LayerWeights
from triblade.ops.backend import Linear

# Buffers that old tools saved beside the weights.
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")


class TensorSource(Protocol):
    """What is needed of a checkpoint (see `models.checkpoint`)."""

    def names(self) -> frozenset[str]: ...

    def tensor(self, name: str) -> Tensor: ...


def resolve_tied_head(config: ModelConfig, names: frozenset[str]) -> ModelConfig:
    """Let the tensor list decide where the configuration's default and the file disagree.

    A file without `lm_head.weight` has a tied head, whatever the default says; one that says it is tied but stores a head
    keeps the tie (the copy is redundant).
    """
    if "lm_head.weight" not in names and not config.tie_word_embeddings:
        return replace(config, tie_word_embeddings=True)
    return config


def load_weights(
    source: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Read every parameter, one layer at a time.

    Raises:
        CheckpointError: a parameter is missing, has another shape, or the checkpoint holds one the model does not have.
    """
    reader = _Reader(source, config, dtype, torch.device(device))
    weights = reader.decoder()
    reader.check_nothing_left()
    return weights


@dataclass
class _Reader:
    """Reads tensors by name, checks shapes and remembers what was read."""

    source: TensorSource
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    read: set[str] = field(default_factory=set)

    def decoder(self) -> DecoderWeights:
        config = self.config
        embedding = self._matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [self._layer(f"model.layers.{index}.") for index in range(config.num_layers)]
        head = embedding
        if config.tie_word_embeddings:
            self.read.add("lm_head.weight")
        else:
            head = self._matrix("lm_head.weight", config.vocab_size, config.hidden_size)
        final_norm = self._norm("model.norm.weight", config.hidden_size)
        return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=Linear(head))

    def check_nothing_left(self) -> None:
        left = sorted(name for name in self.source.names() - self.read if not _NOT_WEIGHTS.search(name))
        if left:
            raise CheckpointError(
                f"the checkpoint holds {len(left)} tensors that a {self.config.architecture} does not have: {_some(left)}",
                hint="config.json and the weights do not belong together",
            )

    def _layer(self, prefix: str) -> LayerWeights:
        config = self.config
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        c, inner = config.hidden_size, config.intermediate_size
        if config.fused_projections:
            qkv = self._merged([(attention + "qkv_proj", config.q_size + 2 * config.kv_size)], c, config.qkv_bias)
            gate_up = self._merged([(mlp + "gate_up_proj", 2 * inner)], c, config.mlp_bias)
        else:
            sizes = (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
            qkv = self._merged([(attention + name, size) for name, size in sizes], c, config.qkv_bias)
            gate_up = self._merged([(mlp + "gate_proj", inner), (mlp + "up_proj", inner)], c, config.mlp_bias)
        # With norms on both sides of a block, the name of the plain pre-MLP norm means the norm behind attention.
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        post = config.post_norms
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm.weight", c),
            qkv=qkv,
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            output=self._merged([(attention + "o_proj", c)], config.q_size, config.output_bias),
            attention_post_norm=self._norm(prefix + "post_attention_layernorm.weight", c) if post else None,
            mlp_norm=self._norm(f"{prefix}{mlp_norm}.weight", c),
            gate_up=gate_up,
            down=self._merged([(mlp + "down_proj", c)], inner, config.mlp_bias),
            mlp_post_norm=self._norm(prefix + "post_feedforward_layernorm.weight", c) if post else None,
        )

    def _merged(self, parts: Iterable[tuple[str, int]], inputs: int, bias: bool) -> Linear:
        """One matrix from the rows of several that share their input."""
        parts = list(parts)
        weight = torch.cat([self._matrix(f"{name}.weight", rows, inputs) for name, rows in parts])
        biases = [self._fetch(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        return Linear(weight, torch.cat(biases).to(self.device, self.dtype) if bias else None)

    def _qk_norm(self, attention: str) -> Tensor:
        config = self.config
        q, k = (self._norm(f"{attention}{name}_norm.weight", config.head_dim) for name in ("q", "k"))
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))  # [H + G, D]

    def _norm(self, name: str, size: int) -> Tensor:
        return self._fetch(name, (size,)).to(self.device, torch.float32) + self.config.norm_offset

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self._fetch(name, (rows, columns)).to(self.device, self.dtype)

    def _fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.source.names():
            prefix = name.rsplit(".", 2)[0]
            near = sorted(other for other in self.source.names() if other.startswith(prefix))
            raise CheckpointError(
                f"the checkpoint has no tensor {name}",
                hint=f"it has: {_some(near)}" if near else "is the download complete?",
            )
        tensor = self.source.tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, the configuration asks for {list(shape)}")
        self.read.add(name)
        return tensor


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
