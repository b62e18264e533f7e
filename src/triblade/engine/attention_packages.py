"""Attention by packages that need not be there: flash-attn, FlashInfer, and our kernel in Triton; imported when they are asked for.

Each class turns a step's groups into what its package takes, and says what it does not take. They queue kernels for whatever
lengths the host knows, so their steps are not recorded. Invariant: a package is only called with what `why_not` let through.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from triblade.engine.attend import AttentionNeeds
from triblade.engine.batch import AttentionGroup
from triblade.kv.cache import KVCache
from triblade.models.config import ModelConfig

HALVES = (torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (8, 0)
FLASH_BLOCK = 256  # flash-attn 2 reads blocks of multiples of this; others are gathered for it
FLASH_MAX_DIM = 256
FLASHINFER_DIMS = (64, 128, 256)
FLASHINFER_WORKSPACE_BYTES = 128 * 2**20
EVERYTHING = 2**30  # tokens of a window that hides nothing


def why_no_package(name: str, needs: AttentionNeeds) -> str | None:
    """What all of these need: a device, 16 bits, and to be importable."""
    if needs.capability is None:
        return "it needs a CUDA device"
    if needs.capability < LEAST_CAPABILITY:
        return f"compute capability {'.'.join(map(str, needs.capability))} ({name}: 8.0)"
    if needs.dtype not in HALVES:
        return f"dtype {str(needs.dtype).removeprefix('torch.')} ({name}: bfloat16, float16)"
    try:
        import_module(name)
    except Exception as error:  # a broken build raises what it likes
        return f"it cannot be imported ({error})"
    return None


def _left(window: int | None) -> int:
    """Keys before a query's own that a window lets it see; -1: all."""
    return -1 if window is None else window - 1


def flash_attn_4(
    q: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, block_table: Tensor | None, **scoring: Any
) -> Tensor:
    """flash-attn 4, called as version 2 is: q [S, Q, H, D] over blocks or, without a table, keys of each sequence."""
    function: Any = import_module("flash_attn.cute").flash_attn_varlen_func
    out: Tensor = function(q, keys, values, seqused_k=cache_seqlens, page_table=block_table, **scoring)[0]
    return out


class FlashAttention:
    """flash-attn, group by group: version 2, or 4, which has another function and reads any block."""

    is_package = True

    def __init__(self, cache: KVCache, config: ModelConfig) -> None:
        version_2: Any = getattr(import_module("flash_attn"), "flash_attn_with_kvcache", None)
        self._call: Any = version_2 or flash_attn_4
        self._cache = cache
        self._config = config
        fits = version_2 is None or cache.layout.block_size % FLASH_BLOCK == 0
        self._is_paged = fits and cache.stores_vectors
        self._groups: Sequence[AttentionGroup] = ()
        self._lengths: list[Tensor] = []  # [S] int32 each

    @staticmethod
    def why_not(needs: AttentionNeeds) -> str | None:
        """What keeps it from being taken, or None."""
        dim = needs.model.head_dim
        if dim > FLASH_MAX_DIM or dim % 8:
            return f"head size {dim} (flash_attn: multiples of 8 up to {FLASH_MAX_DIM})"
        return why_no_package("flash_attn", needs)

    def begin(self, groups: Sequence[AttentionGroup]) -> None:
        """See `StepAttention`."""
        self._groups = groups
        self._lengths = [(group.positions[:, -1] + 1).int() for group in groups]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `StepAttention`."""
        pairs = zip(self._groups, self._lengths, strict=True)
        return torch.cat([self._attend(layer, group, lengths, q[group.rows]) for group, lengths in pairs])

    def _attend(self, layer: int, group: AttentionGroup, lengths: Tensor, q: Tensor) -> Tensor:
        config, tables = self._config, None
        if self._is_paged:
            keys, values = self._cache.vectors(layer)  # [blocks, block_size, G, D]
            tables = group.block_table.int()
        else:
            keys, values = self._cache.read(layer, group.block_table)  # [S, L, G, D]
        out: Tensor = self._call(
            q.reshape(*group.positions.shape, *q.shape[1:]),
            keys,
            values,
            cache_seqlens=lengths,
            block_table=tables,
            softmax_scale=config.attention_scale,
            causal=True,
            window_size=(_left(config.layers[layer].window), -1),
            softcap=config.attention_softcap or 0.0,
        )
        return out.reshape(q.shape)


class FlashInfer:
    """FlashInfer's prefill over a paged cache, which decoding is a case of: one plan for a step and window."""

    is_package = True

    def __init__(self, cache: KVCache, config: ModelConfig) -> None:
        self._package: Any = import_module("flashinfer")
        self._cache = cache
        self._config = config
        device = cache.pool.device
        self._workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        windows = {layer.window for layer in config.layers}
        make = self._package.BatchPrefillWithPagedKVCacheWrapper
        self._plans: dict[int | None, Any] = {window: make(self._workspace, "NHD") for window in windows}

    @staticmethod
    def why_not(needs: AttentionNeeds) -> str | None:
        """What keeps it from being taken, or None."""
        dim = needs.model.head_dim
        if dim not in FLASHINFER_DIMS:
            return f"head size {dim} (flashinfer: {', '.join(map(str, FLASHINFER_DIMS))})"
        if needs.codec != str(needs.dtype).removeprefix("torch."):
            return f"KV cache dtype {needs.codec} (flashinfer: that of the model)"
        return why_no_package("flashinfer", needs)

    def begin(self, groups: Sequence[AttentionGroup]) -> None:
        """See `StepAttention`."""
        config, layout = self._config, self._cache.layout
        queries, blocks, pages, last = [0], [0], list[Tensor](), list[int]()
        for group in groups:
            for table, end in zip(group.block_table, group.positions[:, -1].tolist(), strict=True):
                count = layout.blocks_for(end + 1)
                queries.append(queries[-1] + group.positions.shape[1])
                blocks.append(blocks[-1] + count)
                pages.append(table[:count])
                last.append(end % layout.block_size + 1)
        # On the host, where the plan is made; it sends them.
        lists = [torch.tensor(numbers, dtype=torch.int32) for numbers in (queries, blocks, last)]
        for window, plan in self._plans.items():
            plan.plan(
                lists[0],
                lists[1],
                torch.cat(pages).int(),
                lists[2],
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                layout.block_size,
                causal=True,
                sm_scale=config.attention_scale,
                window_left=_left(window),
                logits_soft_cap=config.attention_softcap,
                q_data_type=self._cache.dtype,
                kv_data_type=self._cache.dtype,
            )

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `StepAttention`."""
        plan = self._plans[self._config.layers[layer].window]
        out: Tensor = plan.run(q.contiguous(), self._cache.vectors(layer))
        return out


class TritonAttention:
    """`ops.triton.attention`, group by group."""

    is_package = True

    def __init__(self, cache: KVCache, config: ModelConfig) -> None:
        self._call: Any = import_module("triblade.ops.triton.attention").paged_attention
        self._cache = cache
        self._config = config
        self._groups: list[tuple[slice, Tensor, Tensor]] = []  # rows, tables [S, B] int32, positions [S, Q] int32

    @staticmethod
    def why_not(needs: AttentionNeeds) -> str | None:
        """What keeps it from being taken, or None."""
        if needs.codec != str(needs.dtype).removeprefix("torch."):
            return f"KV cache dtype {needs.codec} (triton: that of the model)"
        return why_no_package("triton", needs)

    def begin(self, groups: Sequence[AttentionGroup]) -> None:
        """See `StepAttention`."""
        self._groups = [
            (group.rows, group.block_table.int().contiguous(), group.positions.int().contiguous()) for group in groups
        ]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `StepAttention`."""
        config, cache = self._config, self._cache.vectors(layer)
        window = config.layers[layer].window or EVERYTHING
        scoring = (config.attention_scale, config.attention_softcap or 0.0, window)
        return torch.cat(
            [self._call(q[rows], cache, tables, positions, scoring) for rows, tables, positions in self._groups]
        )
