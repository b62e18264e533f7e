"""Rotation, cache writes and attention over a paged cache as kernel launches.

Tokens are those of S sequences with Q tokens each. What the kernels do not take is said by `why_not`. Knows where a layer's planes
lie (`PagedLayer`), but no cache object. Invariant: a row whose slot or position is negative is nobody's and changes nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triblade.ops.cuda.device import Device, pointer
from triblade.ops.cuda.linear import Activations

TILE_QUERIES = 16  # rows of a block: queries times heads of a group
WARPS = 4
TURN_KEYS = 16  # of a warp
MAX_HEAD_DIM = 256
MANY_TOKENS = 512  # of a rotation: from so many on a warp takes several heads, and has the next one on its way
TARGET_BLOCKS = 264  # two per multiprocessor of a large device
MOST_SPLITS = 32
# Where this many blocks attend, keys and values arrive in boxes, by themselves; fewer blocks are done sooner with plain loads.
BOXED_BLOCKS = 128
# From so many heads of sequences on, turns are shared out evenly (`kernels/crowd.cu`), which costs some microseconds at its end.
CROWD_HEADS = 1024
MOST_CROWD = 512  # sequences
CROWD_WARPS = {True: 12, False: 8}  # of a multiprocessor, by whether the cache is int8: what its registers hold
STAGES = 3  # boxes of a warp
BOX_MEMORY = 216 * 1024  # shared memory of a multiprocessor for boxes
SLICE_BYTES = 128


def why_not(head_dim: int, codec: str, dtype: torch.dtype) -> str | None:
    """What keeps the kernels from attending over such a cache, or None."""
    if head_dim % 64 or head_dim > MAX_HEAD_DIM:
        return f"head size {head_dim} (CUDA kernels: 64, 128, 192, 256)"
    if codec not in ("int8", str(dtype).removeprefix("torch.")):
        return f"KV cache dtype {codec} with activations in {dtype} (CUDA kernels: the same, or int8)"
    return None


def why_not_rotated(rotary_dim: int) -> str | None:
    """What keeps the kernels from rotating so many dimensions of a head, or None."""
    return f"{rotary_dim} rotated dimensions (CUDA kernels: a multiple of 4)" if rotary_dim % 4 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayer:
    """Where one layer's keys and values lie in a pool of rows; offsets in bytes within a row."""

    pool: Tensor  # uint8 [blocks, row_bytes]
    keys: int
    values: int
    key_scales: int
    value_scales: int
    block_size: int
    num_heads: int
    head_dim: int
    is_int8: bool

    @property
    def vector_bytes(self) -> int:
        """Of a head's key or value."""
        return self.head_dim * (1 if self.is_int8 else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How queries and keys are normed and rotated."""

    cosines: Tensor  # [positions, R] float32
    sines: Tensor
    norm: Tensor | None  # [H + G, D] float32
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The tokens of a step: S sequences of `queries` tokens each, T in all."""

    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32
    tables: Tensor  # [S, width] int32
    queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores are made of products."""

    scale: float
    softcap: float | None
    window: int | None


class _Pool(ctypes.Structure):
    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("row_bytes", ctypes.c_uint64),
        ("keys", ctypes.c_int),
        ("values", ctypes.c_int),
        ("key_scales", ctypes.c_int),
        ("value_scales", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("is_int8", ctypes.c_int),
    )


class _Cache(ctypes.Structure):
    _fields_ = (*_Pool._fields_[:-3], _Pool._fields_[-2])


class _Rotation(ctypes.Structure):
    _fields_ = (
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("half", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


class _Queries(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("q_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("queries", ctypes.c_int),
        ("group", ctypes.c_int),
    )


class _Scores(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", ctypes.c_int))


class _Target(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("layout", ctypes.c_int), ("first_token", ctypes.c_int))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What `AttentionKernels.attend` is asked for, as its kernels take it."""

    queries: _Queries
    scores: _Scores
    count: int  # sequences
    most_keys: int  # of one
    constants: dict[str, int]

    @property
    def rows(self) -> int:
        return int(self.queries.queries * self.queries.group)


_NO_BOXES = (ctypes.c_char * 128)()  # in the place of a map


class AttentionKernels:
    """Attention on one device.

    Args:
        device: where kernels run.
        dtype: of activations.
        memory: where scratch lies.
    """

    def __init__(self, device: Device, dtype: torch.dtype, memory: torch.device) -> None:
        self._device = device
        self._is_float16 = int(dtype == torch.float16)
        self._memory = memory
        self._workspace = torch.empty(0, dtype=torch.uint8, device=memory)
        self._counters = torch.zeros(0, dtype=torch.int32, device=memory)
        self._outgrown: list[tuple[Tensor, Tensor]] = []  # recorded steps may still use it
        self._box_maps: dict[tuple[int, int], Any] = {}  # of layers

    def rotate_and_write(self, qkv: Tensor, sequences: Sequences, layer: PagedLayer, rotation: Rotation) -> None:
        """Norm and rotate the queries of qkv [T, (H + 2 G) * D] in place; keys and values go to the cache."""
        heads = qkv.shape[1] // layer.head_dim
        kernel = self._device.kernel("vectors.cu", "rotate_and_write", {"FLOAT16": self._is_float16})
        half = rotation.cosines.shape[1]
        how = _Rotation(
            rotation.cosines.data_ptr(), rotation.sines.data_ptr(), pointer(rotation.norm).value, half, rotation.eps
        )
        numbers = (heads - 2 * layer.num_heads, layer.head_dim)
        arguments = (pointer(qkv), pointer(sequences.positions), pointer(sequences.slots), _Pool(*_places(layer)), how)
        blocks = -(-heads // WARPS)
        grid = (blocks if qkv.shape[0] < MANY_TOKENS else -(-blocks // 4), qkv.shape[0], 1)
        self._device.launch(kernel, grid, 32 * WARPS, [*arguments, *map(ctypes.c_int, numbers)])

    def attend(
        self,
        qkv: Tensor,
        sequences: Sequences,
        layer: PagedLayer,
        scoring: Scoring,
        out: Activations,
        first_row: int = 0,
    ) -> None:
        """out [T, H * D], from row `first_row` on, of rotated queries in qkv [T, (H + 2 G) * D]; this step's keys are cached."""
        group = out.values.shape[1] // (layer.head_dim * layer.num_heads)
        queries = _Queries(
            qkv.data_ptr(),
            sequences.positions.data_ptr(),
            sequences.tables.data_ptr(),
            qkv.shape[1],
            sequences.tables.shape[1],
            sequences.queries,
            group,
        )
        asked = _Asked(
            queries=queries,
            scores=_Scores(scoring.scale, scoring.softcap or 0.0, scoring.window or 0),
            count=sequences.tables.shape[0],
            most_keys=sequences.tables.shape[1] * layer.block_size,
            constants={
                "FLOAT16": self._is_float16,
                "DIM": layer.head_dim,
                "KV8": int(layer.is_int8),
                "BLOCK": layer.block_size,
                "SOFTCAP": int(scoring.softcap is not None),
            },
        )
        if self._is_crowd(asked, layer):
            self._share_out(asked, layer, out, first_row)
        else:
            self._split(asked, layer, out, first_row)

    def _takes_boxes(self, layer: PagedLayer) -> bool:
        fits = layer.block_size % TURN_KEYS == 0 and layer.vector_bytes % SLICE_BYTES == 0
        return self._device.has_warpgroups and fits

    def _is_crowd(self, asked: _Asked, layer: PagedLayer) -> bool:
        is_many = asked.count * layer.num_heads >= CROWD_HEADS and asked.count <= MOST_CROWD
        return self._takes_boxes(layer) and is_many and asked.rows <= TILE_QUERIES

    def _split(self, asked: _Asked, layer: PagedLayer, out: Activations, first_row: int) -> None:
        """Every sequence by itself, over parts of its keys."""
        tiles = -(-asked.rows // TILE_QUERIES)
        blocks, count = layer.num_heads * tiles, asked.count
        most = -(-asked.most_keys // (TURN_KEYS * WARPS))
        splits = max(1, min(MOST_SPLITS, most, TARGET_BLOCKS // (blocks * count)))
        self._reserve(splits * blocks * count, blocks * count, layer.head_dim)
        is_boxed = blocks * count >= BOXED_BLOCKS and self._takes_boxes(layer)
        shared = {"IN_BOXES": int(is_boxed), "GROUPS": layer.num_heads, "STAGES": STAGES}
        kernel = self._device.kernel("attention.cu", "attention", {**asked.constants, **shared})
        numbers = (ctypes.c_int(out.layout), ctypes.c_int(first_row))
        scratch = (pointer(self._workspace), pointer(self._counters))
        boxes = self._boxes(layer) if is_boxed else _NO_BOXES
        arguments = (boxes, asked.queries, _cache(layer), asked.scores, pointer(out.values), *numbers, *scratch)
        shared_bytes = 1024 + WARPS * _ring_bytes(layer) if is_boxed else 0
        self._device.launch(kernel, (splits, blocks, count), 32 * WARPS, arguments, shared_bytes=shared_bytes)

    def _share_out(self, asked: _Asked, layer: PagedLayer, out: Activations, first_row: int) -> None:
        """All sequences together, their turns shared out evenly over workers."""
        heads, warp_bytes = _heads_of_block(layer.num_heads), _ring_bytes(layer)
        resident = max(1, min(CROWD_WARPS[layer.is_int8], BOX_MEMORY // warp_bytes) // heads)
        workers = -(-self._device.multiprocessors * resident * heads // layer.num_heads)
        self._reserve(2 * layer.num_heads * workers, asked.count * layer.num_heads, layer.head_dim)
        constants = {"IN_BOXES": 1, "HEADS": heads, "GROUPS": layer.num_heads, "STAGES": STAGES, "BLOCKS": resident}
        kernel = self._device.kernel("crowd.cu", "crowd", {**asked.constants, **constants})
        target = _Target(out.values.data_ptr(), out.layout, first_row)
        scratch = (ctypes.c_int(asked.count), pointer(self._workspace), pointer(self._counters))
        arguments = (self._boxes(layer), asked.queries, _cache(layer), asked.scores, target, *scratch)
        grid = (workers, layer.num_heads // heads, 1)
        self._device.launch(kernel, grid, 32 * heads, arguments, shared_bytes=1024 + heads * warp_bytes)

    def _boxes(self, layer: PagedLayer) -> Any:
        """A layer's keys and values in boxes of a turn of one head."""
        key = (layer.pool.data_ptr(), layer.keys)
        if key not in self._box_maps:
            slices, rows = layer.vector_bytes // SLICE_BYTES, layer.pool.shape
            sizes = (SLICE_BYTES, layer.block_size, layer.num_heads * slices, 2, rows[0])
            strides = (layer.num_heads * layer.vector_bytes, SLICE_BYTES, layer.values - layer.keys, rows[1])
            box = (SLICE_BYTES, TURN_KEYS, slices, 2, 1)
            self._box_maps[key] = self._device.box_map(layer.pool, layer.keys, sizes, strides, box)
        return self._box_maps[key]

    def reserve(self, num_sequences: int, queries: int, layer: PagedLayer, group: int) -> None:
        """Scratch for steps of up to this size, made once, since recorded steps keep its address."""
        blocks = layer.num_heads * -(-group * queries // TILE_QUERIES) * num_sequences
        self._reserve(max(blocks, TARGET_BLOCKS), blocks, layer.head_dim)

    def _reserve(self, partials: int, counters: int, head_dim: int) -> None:
        """Grow scratch; a head of more than 128 dimensions takes two partial results per block."""
        size = partials * (2 if head_dim > 128 else 1) * (TILE_QUERIES * (head_dim + 2) * 4)
        if self._workspace.nbytes < size or self._counters.numel() < counters:
            self._outgrown.append((self._workspace, self._counters))
        if self._workspace.nbytes < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self._memory)
        if self._counters.numel() < counters:
            self._counters = torch.zeros(counters, dtype=torch.int32, device=self._memory)


def _places(layer: PagedLayer) -> tuple[int, ...]:
    offsets = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return (
        layer.pool.data_ptr(), layer.pool.shape[1], *offsets, layer.block_size, layer.num_heads, int(layer.is_int8)
    )  # fmt: skip


def _cache(layer: PagedLayer) -> _Cache:
    places = _places(layer)
    return _Cache(*places[:-3], places[-2])


def _ring_bytes(layer: PagedLayer) -> int:
    """What a warp keeps on its way: boxes of keys and values, with int8 the scales of all heads."""
    scales = 2 * 2 * TURN_KEYS * layer.num_heads if layer.is_int8 else 0
    return STAGES * (2 * TURN_KEYS * layer.vector_bytes + scales)


def _heads_of_block(num_heads: int) -> int:
    """Heads that a block of `kernels/crowd.cu` takes: as many as share its memory well, and the same number in every block."""
    return next(heads for heads in (4, 3, 2, 1) if num_heads % heads == 0)
