"""The one decoder of this package: what differs between model families is data in `ModelConfig`, not code.

It knows no cache, batch or request: tokens are a flat list, and attention is an argument. `attend(layer, q, k, v)` gets the
rotated queries q [T, H, D], keys k and values v [T, G, D] of all T tokens and returns [T, H, D]; it decides who sees whom, so that
serving, calibration and evaluation run this same code. `DenseAttend` is the plainest one: one sequence, no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from triblade.models.config import ModelConfig
from triblade.models.rope import rope_table
from triblade.ops.backend import AttentionMask, Backend, Linear

M = TypeVar("M")  # a matrix as its backend multiplies it
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Watch: TypeAlias = Callable[[int, Tensor], None]  # layer, the residual stream behind it [T, C]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights(Generic[M]):
    """One block; norms are float32 with the family's offset already added, projections that share an input are one matrix."""

    input_norm: Tensor  # [C]
    qkv: M  # [(H + 2 G) * D, C]
    qk_norm: Tensor | None = None  # [H + G, D]
    output: M  # [C, H * D]
    attention_post_norm: Tensor | None = None  # [C]
    mlp_norm: Tensor  # [C]
    gate_up: M  # [2 I, C]
    down: M  # [C, I]
    mlp_post_norm: Tensor | None = None  # [C]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights(Generic[M]):
    """All weights, with matrices of a backend's own kind; a tied head is the embedding itself, not a copy."""

    embedding: M  # [V, C]
    layers: list[LayerWeights[M]]
    final_norm: Tensor  # [C]
    head: M  # [V, C]


class Decoder:
    """Tokens and positions in, hidden states and logits out.

    Args:
        config: the model.
        weights: see `models.weights.load_weights`.
        backend: the kernels.
        context_length: positions the rope tables cover; at most what the model takes.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights[Linear], backend: Backend, context_length: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.backend = backend
        self.context_length = context_length
        self.device = weights.embedding.weight.device
        self.dtype = weights.embedding.weight.dtype
        self._ropes = [rope_table(rope, context_length, self.device) for rope in config.ropes]

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, watch: Watch | None = None) -> Tensor:
        """Final-norm hidden states [T, C] of tokens [T] at absolute positions [T]; `watch` is shown every layer's result."""
        x = self.backend.embed(self.weights.embedding.weight, input_ids, self.config.embedding_scale)  # [T, C]
        ropes = self.rotations(positions)
        for index, layer in enumerate(self.weights.layers):
            mixed = self.attention_mix(index, layer, x, ropes[self.config.layers[index].rope], attend)
            x = x + self.attention_out(layer, mixed)
            x = x + self.mlp_out(layer, self.mlp_mix(layer, x))
            if watch is not None:
                watch(index, x)
        return self.backend.rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)

    def rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines [T, R/2] of positions [T], for every rope of the model."""
        return [(cos[positions], sin[positions]) for cos, sin in self._ropes]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, C] -> [R, V] float32."""
        return self.backend.logits(hidden, self.weights.head, self.config.logits_softcap)

    def attention_mix(
        self, index: int, layer: LayerWeights[Linear], x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """What the output projection of attention multiplies, [T, H * D], from the residual stream [T, C]."""
        config, ops = self.config, self.backend
        qkv = ops.linear(ops.rms_norm(x, layer.input_norm, config.rms_norm_eps), layer.qkv)
        heads = qkv.view(x.shape[0], -1, config.head_dim)  # [T, H + 2 G, D]
        qk, v = heads.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), 1)
        if layer.qk_norm is not None:
            qk = self._norm_heads(qk, layer.qk_norm)
        q, k = ops.rope(qk, *rope).split((config.num_heads, config.num_kv_heads), 1)
        return attend(index, q, k, v).reshape(x.shape[0], -1)

    def attention_out(self, layer: LayerWeights[Linear], mixed: Tensor) -> Tensor:
        """What attention adds to the residual stream: [T, H * D] -> [T, C]."""
        return self._normalized(self.backend.linear(mixed, layer.output), layer.attention_post_norm)

    def mlp_mix(self, layer: LayerWeights[Linear], x: Tensor) -> Tensor:
        """What the down projection multiplies, [T, I], from the residual stream [T, C]."""
        config, ops = self.config, self.backend
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps), layer.gate_up)
        return ops.gated_activation(gate_up, config.activation)

    def mlp_out(self, layer: LayerWeights[Linear], mixed: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream: [T, I] -> [T, C]."""
        return self._normalized(self.backend.linear(mixed, layer.down), layer.mlp_post_norm)

    def _normalized(self, out: Tensor, norm: Tensor | None) -> Tensor:
        return out if norm is None else self.backend.rms_norm(out, norm, self.config.rms_norm_eps)

    def _norm_heads(self, qk: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over each head, with one weight for query heads and one for key heads: weight [H + G, D]."""
        ones = torch.ones_like(weight[0])
        return (self.backend.rms_norm(qk.float(), ones, self.config.rms_norm_eps) * weight).to(qk.dtype)


class DenseAttend:
    """Attention of one sequence over itself, from position 0, without a cache."""

    def __init__(self, config: ModelConfig, backend: Backend, length: int, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._backend = backend
        positions = torch.arange(length, device=device)
        self._masks = {layer.window: window_mask(positions[None], length, layer.window) for layer in config.layers}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self._config
        mask = self._masks[config.layers[layer].window]
        return self._backend.attention(
            q[None], k[None], v[None], mask, config.attention_scale, config.attention_softcap
        )[0]


def window_mask(positions: Tensor, keys: int, window: int | None) -> AttentionMask:
    """Causal mask of queries at `positions` [S, Q] over keys 0 .. keys - 1, limited to the last `window` of them.

    A single sequence whose queries are its last tokens and whose window hides nothing needs no explicit mask.
    """
    if positions.shape[0] == 1 and int(positions[0, -1]) == keys - 1 and (window is None or window >= keys):
        return AttentionMask(None)
    key = torch.arange(keys, device=positions.device)
    distance = positions[..., None] - key  # [S, Q, L]
    return AttentionMask((distance >= 0) & (distance < (window or keys)))
