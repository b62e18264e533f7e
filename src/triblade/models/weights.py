"""From a checkpoint's tensors to the decoder's weights: merged projections, folded norm offsets, tied heads, strict completeness.

Every parameter the configuration implies is read once and checked for its shape; a tensor of the checkpoint that nobody asked
for is an error too, unless it is known to carry no weight. Knows no file format: a checkpoint answers names with tensors.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol

import torch
from torch import Tensor

from triblade.errors import CheckpointError
from triblade.models.config import ModelConfig
from triblade.models.decoder import DecoderWeights, LayerWeights, M
from triblade.ops.backend import Linear

# Buffers that old tools saved beside the weights.
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


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
) -> DecoderWeights[Linear]:
    """Read every parameter as dense matrices, one layer at a time.

    Raises:
        CheckpointError: a parameter is missing, has another shape, or the checkpoint holds one the model does not have.
    """
    return DenseReader(source, config, dtype, torch.device(device)).read()


def wanted_names(source: TensorSource, config: ModelConfig) -> frozenset[str]:
    """Tensors of the checkpoint that carry weights of the model: all, but for layers that it skips."""
    return frozenset(n for n in source.names() if not _NOT_WEIGHTS.search(n) and not _is_skipped(n, config))


def _is_skipped(name: str, config: ModelConfig) -> bool:
    layer = _LAYER.match(name)
    return layer is not None and 0 <= int(layer[1]) - config.num_layers < config.skipped_layers


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def layer_modules(config: ModelConfig, index: int) -> dict[str, list[tuple[str, int]]]:
    """The linear layers of one layer as a checkpoint names them, (name, rows), by the field of `LayerWeights` that merges them."""
    attention, mlp = layer_prefix(index) + "self_attn.", layer_prefix(index) + "mlp."
    if config.fused_projections:
        qkv = [(attention + "qkv_proj", config.q_size + 2 * config.kv_size)]
        gate_up = [(mlp + "gate_up_proj", 2 * config.intermediate_size)]
    else:
        sizes = (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
        qkv = [(attention + name, size) for name, size in sizes]
        gate_up = [(mlp + name, config.intermediate_size) for name in ("gate_proj", "up_proj")]
    output, down = [(attention + "o_proj", config.hidden_size)], [(mlp + "down_proj", config.hidden_size)]
    return {"qkv": qkv, "output": output, "gate_up": gate_up, "down": down}


def mlp_norm_name(config: ModelConfig, index: int) -> str:
    """The tensor of the norm before the feed-forward.

    With norms on both sides of a block, the name of the plain pre-MLP norm means the norm behind attention.
    """
    name = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return f"{layer_prefix(index)}{name}.weight"


class WeightReader(ABC, Generic[M]):
    """Reads tensors by name, checks shapes and remembers what was read; a subclass says what a matrix is."""

    def __init__(self, source: TensorSource, config: ModelConfig, device: torch.device) -> None:
        self.source = source
        self.config = config
        self.device = device
        self._read: set[str] = set()

    @abstractmethod
    def merged(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> M:
        """One matrix from the rows of several (name, rows) that share their input."""

    @abstractmethod
    def gate_up(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> M:
        """The same, for the two halves of a gated feed-forward."""

    @abstractmethod
    def embedding(self, name: str, rows: int, columns: int) -> M:
        """An embedding or a head."""

    def read(self) -> DecoderWeights[M]:
        """Everything; raises if something is missing or left over."""
        config = self.config
        embedding = self.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        layers = [self.layer(index) for index in range(config.num_layers)]
        head = embedding
        if config.tie_word_embeddings:
            self._read.add("lm_head.weight")
        else:
            head = self.embedding("lm_head", config.vocab_size, config.hidden_size)
        final_norm = self._norm("model.norm.weight", config.hidden_size)
        self._check_nothing_left()
        return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the checkpoint, as stored.

        Raises:
            CheckpointError: it is not there, or has another shape.
        """
        self.expect(name)
        tensor = self.source.tensor(name)
        check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def expect(self, name: str) -> None:
        """Note that a tensor is read.

        Raises:
            CheckpointError: there is none of that name; the hint has those near it.
        """
        if name not in self.source.names():
            prefix = name.rsplit(".", 2)[0]
            near = sorted(other for other in self.source.names() if other.startswith(prefix))
            raise CheckpointError(
                f"the checkpoint has no tensor {name}",
                hint=f"it has: {_some(near)}" if near else "is the download complete?",
            )
        self._read.add(name)

    def _check_nothing_left(self) -> None:
        unread = sorted(wanted_names(self.source, self.config) - self._read)
        left = [name for name in unread if not self._is_zero_bias(name)]
        if left:
            raise CheckpointError(
                f"the checkpoint holds {len(left)} tensors that a {self.config.architecture} does not have: {_some(left)}",
                hint="config.json and the weights do not belong together",
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Some quantizers give every layer a bias, and save zeros where the model has none."""
        return name.endswith(".bias") and not bool(self.source.tensor(name).any())

    def layer(self, index: int) -> LayerWeights[M]:
        """Everything of one layer."""
        config, prefix = self.config, layer_prefix(index)
        c, inner = config.hidden_size, config.intermediate_size
        parts = layer_modules(config, index)
        post = config.post_norms
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm.weight", c),
            qkv=self.merged(parts["qkv"], c, bias=config.qkv_bias),
            qk_norm=self._qk_norm(prefix + "self_attn.") if config.qk_norm else None,
            output=self.merged(parts["output"], config.q_size, bias=config.output_bias),
            attention_post_norm=self._norm(prefix + "post_attention_layernorm.weight", c) if post else None,
            mlp_norm=self._norm(mlp_norm_name(config, index), c),
            gate_up=self.gate_up(parts["gate_up"], c, bias=config.mlp_bias),
            down=self.merged(parts["down"], inner, bias=config.mlp_bias),
            mlp_post_norm=self._norm(prefix + "post_feedforward_layernorm.weight", c) if post else None,
        )

    def _qk_norm(self, attention: str) -> Tensor:
        config = self.config
        q, k = (self._norm(f"{attention}{name}_norm.weight", config.head_dim) for name in ("q", "k"))
        return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))  # [H + G, D]

    def _norm(self, name: str, size: int) -> Tensor:
        return self.fetch(name, (size,)).to(self.device, torch.float32) + self.config.norm_offset


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Compare a tensor's shape with what the configuration says.

    Raises:
        CheckpointError: they differ.
    """
    if found != wanted:
        raise CheckpointError(f"{name} has shape {list(found)}, the configuration asks for {list(wanted)}")


class DenseReader(WeightReader[Linear]):
    """Matrices as tensors of one type."""

    def __init__(self, source: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(source, config, device)
        self._dtype = dtype

    def merged(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
        """Rows of all parts, one after the other."""
        weights = [self._to(self.fetch(f"{name}.weight", (rows, inputs))) for name, rows in parts]
        biases = [self._to(self.fetch(f"{name}.bias", (rows,))) for name, rows in parts] if bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)  # a cat of one would copy
        return Linear(weight, torch.cat(biases) if bias else None)

    def gate_up(self, parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
        """All gate rows, then all up rows."""
        return self.merged(parts, inputs, bias=bias)

    def embedding(self, name: str, rows: int, columns: int) -> Linear:
        """[V, C]."""
        return self.merged([(name, rows)], columns, bias=False)

    def _to(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self._dtype)


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
