"""Attention over the paged cache, as the decoder's `attend` argument: write this step's keys, then attend.

How is an argument: `GatheredAttention` reads the keys of each group and computes with torch; other ways are in
`attention_packages`. One of them serves many steps, one after the other, and is told when one begins. Knows neither
requests nor the scheduler. Invariant: masks and plans are made once per step and window, not per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triblade.engine.batch import AttentionGroup, Batch
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.models.decoder import window_mask
from triblade.ops.attention import AttentionFunction, eager_attention, sdpa_attention
from triblade.ops.backend import AttentionMask, Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """What a model, its cache and its device ask of an attention."""

    model: ModelConfig
    dtype: torch.dtype
    codec: str
    capability: tuple[int, int] | None  # of the CUDA device; None: there is none


class StepAttention(Protocol):
    """Attention of all tokens of a step over a cache that holds the step's own keys."""

    def begin(self, groups: Sequence[AttentionGroup]) -> None:
        """A step begins; its tokens are those of the groups, in their order."""
        ...

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Queries [T, H, D] of the step, rotated -> [T, H, D]; rows of q may lie apart."""
        ...


class GatheredAttention:
    """Reads keys and values of the blocks of each group into tensors of their own, and computes with a function of torch.

    Args:
        attention: see `ops.attention`.
        cache: keys and values.
        config: the model.
    """

    def __init__(self, attention: AttentionFunction, cache: KVCache, config: ModelConfig) -> None:
        self._attention = attention
        self._cache = cache
        self._config = config
        self._groups: Sequence[AttentionGroup] = ()
        self._masks: list[dict[int | None, AttentionMask]] = []

    def begin(self, groups: Sequence[AttentionGroup]) -> None:
        """See `StepAttention`."""
        windows = {layer.window for layer in self._config.layers}
        self._groups = groups
        self._masks = [{w: window_mask(group.positions, group.num_keys, w) for w in windows} for group in groups]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `StepAttention`."""
        groups = zip(self._groups, self._masks, strict=True)
        parts = [self._attend(layer, group, masks, q[group.rows]) for group, masks in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, group: AttentionGroup, masks: dict[int | None, AttentionMask], q: Tensor) -> Tensor:
        config = self._config
        keys, values = (x[:, : group.num_keys] for x in self._cache.read(layer, group.block_table))  # [S, L, G, D]
        if group.foreign is not None:  # a masked key weighs nothing, but nothing times NaN is NaN
            for x in (keys, values):
                x.masked_fill_(group.foreign[..., None, None], 0.0)
        grouped = q.reshape(*group.positions.shape, *q.shape[1:])  # [S, Q, H, D]
        mask = masks[config.layers[layer].window]
        out = self._attention(grouped, keys, values, mask, config.attention_scale, config.attention_softcap)
        return out.reshape(q.shape)


class SdpaAttention(GatheredAttention):
    """torch's fused attention."""

    is_package = False

    def __init__(self, cache: KVCache, config: ModelConfig) -> None:
        super().__init__(sdpa_attention, cache, config)

    @staticmethod
    def why_not(needs: AttentionNeeds) -> str | None:
        """What keeps it from being taken, or None."""
        return "torch's kernel cannot cap scores, as this model does" if needs.model.attention_softcap else None


class EagerAttention(GatheredAttention):
    """The formula, spelled out in float32."""

    is_package = False

    def __init__(self, cache: KVCache, config: ModelConfig) -> None:
        super().__init__(eager_attention, cache, config)

    @staticmethod
    def why_not(needs: AttentionNeeds) -> str | None:
        """It takes everything."""
        return None


class PagedAttend:
    """See `models.decoder.Attend`; lives for one step.

    Args:
        batch: the step.
        cache: where its keys go.
        config: the model.
        backend: whose attention is used where `attention` is None.
        attention: over the same cache.
    """

    def __init__(
        self,
        batch: Batch,
        cache: KVCache,
        config: ModelConfig,
        backend: Backend,
        attention: StepAttention | None = None,
    ) -> None:
        self._slots = batch.slots
        self._cache = cache
        self._attention = attention or GatheredAttention(backend.attention, cache, config)
        self._attention.begin(batch.groups)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
        self._cache.write(layer, self._slots, k, v)
        return self._attention.attend(layer, q)
