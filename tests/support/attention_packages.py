"""Stand-ins for flash-attn and FlashInfer: they check what they are given as the packages do, and compute it with the formula."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from triblade.ops.attention import eager_attention
from triblade.ops.backend import AttentionMask


def attended(q: Tensor, k: Tensor, v: Tensor, length: int, *, left: int, scale: float, softcap: float | None) -> Tensor:
    """q [Q, H, D], the last of `length` tokens, over k and v [L, G, D]."""
    queries = len(q)
    at, key = torch.arange(length - queries, length)[:, None], torch.arange(length)
    allowed = (key <= at) & ((key >= at - left) if left >= 0 else True)
    mask = AttentionMask(allowed[None])
    return eager_attention(q[None], k[None, :length], v[None, :length], mask, scale, softcap)[0]


def flash_attn(calls: list[dict[str, Any]]) -> ModuleType:
    """Version 2."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor | None,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:
        calls.append({"block_table": block_table, "window_size": window_size, "softcap": softcap})
        assert causal
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert cache_seqlens.dtype == torch.int32
        assert q.dtype == k_cache.dtype == v_cache.dtype
        outs = []
        for number, length in enumerate(cache_seqlens.tolist()):
            if block_table is None:
                k, v = k_cache[number], v_cache[number]
            else:
                assert block_table.dtype == torch.int32
                assert k_cache.shape[1] % 256 == 0
                k, v = (x[block_table[number].long()].flatten(0, 1) for x in (k_cache, v_cache))
            left = window_size[0]
            outs.append(attended(q[number], k, v, length, left=left, scale=softmax_scale, softcap=softcap or None))
        return torch.stack(outs)

    module: Any = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    made: ModuleType = module
    return made


def flash_attn_4(calls: list[dict[str, Any]]) -> dict[str, ModuleType]:
    """Version 4: its modules by name. The outer one holds nothing."""
    inner: Any = ModuleType("flash_attn.cute")

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seqused_k: Tensor,
        page_table: Tensor | None,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
    ) -> tuple[Tensor, None]:
        calls.append({"block_table": page_table, "window_size": window_size, "softcap": softcap})
        assert causal
        assert seqused_k.dtype == torch.int32
        assert page_table is None or (page_table.dtype == torch.int32 and page_table.stride(-1) == 1)
        outs = []
        for number, length in enumerate(seqused_k.tolist()):
            table = None if page_table is None else page_table[number].long()
            keys, values = (x[number] if table is None else x[table].flatten(0, 1) for x in (k, v))
            left = window_size[0]
            outs.append(
                attended(q[number], keys, values, length, left=left, scale=softmax_scale, softcap=softcap or None)
            )
        return torch.stack(outs), None

    inner.flash_attn_varlen_func = flash_attn_varlen_func
    outer: Any = ModuleType("flash_attn")
    outer.cute = inner
    return {"flash_attn": outer, "flash_attn.cute": inner}


class _Wrapper:
    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._plan: tuple[Any, ...] = ()

    def plan(  # noqa: PLR0917 - the package's own
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(part.dtype == torch.int32 for part in lists)
        assert num_qo_heads % num_kv_heads == 0
        self._plan = (*(part.tolist() for part in lists), page_size, sm_scale, window_left, logits_soft_cap)
        self._shape = (num_qo_heads, head_dim_qk)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        queries, blocks, pages, last, page_size, scale, left, softcap = self._plan
        assert q.is_contiguous()
        assert q.shape == (queries[-1], *self._shape)
        outs = []
        for number, tail in enumerate(last):
            table = torch.tensor(pages[blocks[number] : blocks[number + 1]])
            k, v = (x[table].flatten(0, 1) for x in kv)
            length = (len(table) - 1) * page_size + tail
            part = q[queries[number] : queries[number + 1]]
            outs.append(attended(part, k, v, length, left=left, scale=scale, softcap=softcap))
        return torch.cat(outs)


def flashinfer() -> ModuleType:
    """Its paged prefill."""
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = _Wrapper
    made: ModuleType = module
    return made
