"""Paged attention in Triton: a program takes some queries of all heads of a group of one sequence, over its keys tile by tile.

Keys and values are read from the blocks in place. One kernel for chunks and single tokens; it does not split the context, so the
kernels of `ops.cuda` are ahead where sequences are few and long. Source of the recurrence: Milakov and Gimelshein 2018, Dao et
al. 2022. Needs the package triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS, MANY_ROWS = 16, 64  # queries times heads of a group that a program takes
KEYS = 64  # of a tile


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, out, tables, positions, scale, softcap, window, queries,
    q_token, q_head, block_stride, token_stride, head_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    query, member = row // GROUP, row % GROUP
    is_row = query < queries
    at = tl.load(positions + sequence * queries + query, mask=is_row, other=-1)
    d = tl.arange(0, WIDTH)
    is_here = is_row[:, None] & (d < DIM)[None, :]
    token = (sequence * queries + query).to(tl.int64)
    place = token[:, None] * q_token + (head * GROUP + member)[:, None] * q_head + d[None, :]
    rows = tl.load(q + place, mask=is_here, other=0.0)  # [ROWS, WIDTH]
    end = tl.max(at, 0) + 1
    first = tl.maximum(tl.min(tl.where(is_row, at, end), 0) - window + 1, 0) // TILE * TILE
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        block = tl.load(tables + sequence * table_stride + key // BLOCK, mask=key < end, other=0).to(tl.int64)
        base = block * block_stride + (key % BLOCK) * token_stride + head * head_stride
        there = (key < end)[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + base[:, None] + d[None, :], mask=there, other=0.0)  # [TILE, WIDTH]
        v = tl.load(values + base[:, None] + d[None, :], mask=there, other=0.0)
        scores = tl.dot(rows, tl.trans(k)) * scale  # [ROWS, TILE]
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = (key[None, :] <= at[:, None]) & (key[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # rows that saw nothing yet
        shrink, weights = tl.exp(top - safe), tl.exp(scores - safe[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    heads = tl.num_programs(1) * GROUP
    to = (token[:, None] * heads + (head * GROUP + member)[:, None]) * DIM + d[None, :]
    tl.store(out + to, mixed.to(out.dtype.element_ty), mask=is_here)


def paged_attention(
    q: Tensor, cache: tuple[Tensor, Tensor], tables: Tensor, positions: Tensor, scoring: tuple[float, float, int]
) -> Tensor:
    """Queries [S * Q, H, D] -> [S * Q, H, D].

    Args:
        q: its last dimension is dense.
        cache: keys and values [blocks, block_size, G, D] in place, of equal strides.
        tables: [S, width] int32 blocks.
        positions: [S, Q] int32 of the queries.
        scoring: scale, soft cap (0: none), window in tokens.
    """
    keys, values = cache
    (sequences, queries), (_, heads, dim) = positions.shape, q.shape
    block_size, groups = keys.shape[1:3]
    group = heads // groups
    rows = FEW_ROWS if queries * group <= FEW_ROWS else MANY_ROWS
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = (sequences, groups, triton.cdiv(queries * group, rows))
    launch: Any = _attend[grid]
    scale, softcap, window = scoring
    launch(
        q, keys, values, out, tables, positions, scale, softcap, window, queries,
        q.stride(0), q.stride(1), *keys.stride()[:3], tables.stride(0),
        GROUP=group, DIM=dim, WIDTH=triton.next_power_of_2(dim), BLOCK=block_size, ROWS=rows,
        TILE=KEYS, CAPPED=softcap > 0,
    )  # fmt: skip
    return out
