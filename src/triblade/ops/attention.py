"""Attention over gathered keys and values: `eager` spells the formula out, `sdpa` is torch's fused kernel, `tiled` is bit-stable.

All three compute softmax(scale * q k^T, capped and masked) v with grouped heads: q [S, Q, H, D], k and v [S, L, G, D] ->
[S, Q, H, D]. Knows no cache and no batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from triblade.errors import UnsupportedError
from triblade.ops.backend import AttentionMask

_UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

AttentionFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionMask, float, float | None], Tensor]


def unplanned() -> AbstractContextManager[None]:
    """While it lasts, torch's attention takes kernels that need no plan.

    cuDNN's are quicker where shapes return, but plan each new one for tens of milliseconds: too much for text of all lengths.
    """
    return sdpa_kernel(_UNPLANNED)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float | None
) -> Tensor:
    """The formula in float32, materialising all scores; the twin of every other attention."""
    s, queries, heads, d = q.shape
    groups = k.shape[2]
    folded = q.view(s, queries, groups, heads // groups, d).permute(0, 2, 3, 1, 4).float()  # [S, G, H/G, Q, D]
    keys, values = (x.permute(0, 2, 1, 3)[:, :, None].float() for x in (k, v))  # [S, G, 1, L, D]
    scores = torch.matmul(folded, keys.transpose(-1, -2)) * scale  # [S, G, H/G, Q, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    allowed = mask.explicit(queries, k.shape[1], q.device)
    scores = scores.masked_fill(~allowed[:, None, None], -torch.inf)
    out = torch.matmul(scores.softmax(-1), values)  # [S, G, H/G, Q, D]
    return out.permute(0, 3, 1, 2, 4).reshape(s, queries, heads, d).to(q.dtype)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float | None) -> Tensor:
    """torch's scaled_dot_product_attention.

    Raises:
        UnsupportedError: a soft cap, which it does not have; capped models take `eager`.
    """
    if softcap is not None:
        raise UnsupportedError("sdpa attention has no soft cap", hint="use attention_backend eager")
    s, queries, heads, d = q.shape
    groups = k.shape[2]
    keys, values = k.transpose(1, 2), v.transpose(1, 2)  # [S, G, L, D]
    whole = mask.allowed is None and queries == k.shape[1]
    summand = None if whole else mask.explicit(queries, k.shape[1], q.device)[:, None]  # [S, 1, Q, L]
    if queries == 1:
        summand = None if mask.allowed is None else summand  # the one query sees all keys
        # One query a sequence: the heads of a group become the queries of one head, and K is read once for all of them.
        folded = q.view(s, groups, heads // groups, d)  # [S, G, H/G, D]
        return F.scaled_dot_product_attention(folded, keys, values, summand, scale=scale).reshape(s, 1, heads, d)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, summand, is_causal=whole, scale=scale, enable_gqa=heads != groups
    )
    return out.transpose(1, 2)


QUERY_TILE = 16
KEY_TILE = 128


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, softcap: float | None
) -> Tensor:
    """Online softmax over fixed tiles: a query's bits depend on its own keys only, not on chunk, batch or padding.

    Every matrix product has the shape [H/G * QUERY_TILE, D] x [D, KEY_TILE] whatever the request, so each row is computed by
    the same instructions; a tile that is masked as a whole adds exactly zero. Source of the recurrence: Milakov and Gimelshein
    2018, Dao et al. 2022.
    """
    s, queries, heads, d = q.shape
    groups = k.shape[2]
    allowed = mask.explicit(queries, k.shape[1], q.device).expand(s, -1, -1)
    tiles = -(-queries // QUERY_TILE)
    q_pad, k_pad = tiles * QUERY_TILE - queries, -k.shape[1] % KEY_TILE
    folded = F.pad(q, (0, 0, 0, 0, 0, q_pad)).view(s, tiles, QUERY_TILE, groups, heads // groups, d)
    folded = folded.permute(0, 1, 3, 4, 2, 5).reshape(-1, heads // groups * QUERY_TILE, d)  # [S*tiles*G, H/G*16, D]
    keys, values = (F.pad(x, (0, 0, 0, 0, 0, k_pad)).permute(0, 2, 1, 3) for x in (k, v))  # [S, G, L, D]
    seen = F.pad(allowed, (0, k_pad, 0, q_pad)).view(s, tiles, 1, 1, QUERY_TILE, -1)
    seen = seen.expand(-1, -1, groups, heads // groups, -1, -1).reshape(*folded.shape[:2], -1)  # [S*tiles*G, H/G*16, L]
    top = torch.full((*folded.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(folded)
    for start in range(0, keys.shape[2], KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        key, value = (
            x[:, None, :, tile].expand(-1, tiles, -1, -1, -1).reshape(-1, KEY_TILE, d) for x in (keys, values)
        )
        scores = torch.bmm(folded, key.transpose(1, 2)) * scale  # [S*tiles*G, H/G*16, 128]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen[..., tile], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == -torch.inf, 0.0)  # rows that saw nothing yet
        shrink, weights = torch.exp(top - safe), torch.exp(scores - safe)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weights, value)
        top = new_top
    out = (out / total.clamp_min(torch.finfo(out.dtype).tiny)).view(s, tiles, groups, heads // groups, QUERY_TILE, d)
    return out.permute(0, 1, 4, 2, 3, 5).reshape(s, -1, heads, d)[:, :queries]
