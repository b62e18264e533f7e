"""Attention over the paged cache, as the decoder's `attend` argument: write this step's keys, read each group's, attend.

Lives for one step; masks are made once per step and window, not per layer. Knows neither requests nor the scheduler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triblade.engine.batch import AttentionGroup, Batch
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig
from triblade.models.decoder import window_mask
from triblade.ops.backend import AttentionMask, Backend


class PagedAttend:
    """See `models.decoder.Attend`."""

    def __init__(self, batch: Batch, cache: KVCache, config: ModelConfig, backend: Backend) -> None:
        self._batch = batch
        self._cache = cache
        self._config = config
        self._backend = backend
        windows = {layer.window for layer in config.layers}
        self._masks: list[dict[int | None, AttentionMask]] = [
            {window: window_mask(group.positions, group.num_keys, window) for window in windows}
            for group in batch.groups
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H, D]."""
        self._cache.write(layer, self._batch.slots, k, v)
        groups = zip(self._batch.groups, self._masks, strict=True)
        parts = [self._attend(layer, group, masks, q[group.rows]) for group, masks in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, group: AttentionGroup, masks: dict[int | None, AttentionMask], q: Tensor) -> Tensor:
        config = self._config
        keys, values = (x[:, : group.num_keys] for x in self._cache.read(layer, group.block_table))  # [S, L, G, D]
        if group.foreign is not None:  # a masked key weighs nothing, but nothing times NaN is NaN
            for x in (keys, values):
                x.masked_fill_(group.foreign[..., None, None], 0.0)
        grouped = q.view(*group.positions.shape, *q.shape[1:])  # [S, Q, H, D]
        mask = masks[config.layers[layer].window]
        out = self._backend.attention(grouped, keys, values, mask, config.attention_scale, config.attention_softcap)
        return out.reshape(q.shape)
