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
TARGET_BLOCKS = 264  # two per multiprocessor of a large device
MOST_SPLITS = 32
# Where this many blocks attend, keys and values arrive in boxes, by themselves; fewer blocks are done sooner with plain loads.
BOXED_BLOCKS = 128
STAGES = 3  # boxes of a warp
SLICE_BYTES = 128
PROMPT_HEAD_DIMS = (64, 128)
PROMPT_QUERIES, PROMPT_KEYS, PROMPT_THREADS, PROMPT_STAGES = 128, 128, 384, 3  # of `kernels/prompt.cu`


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
class Chunks:
    """Long chunks of S sequences in neighbouring rows."""

    query_starts: Tensor  # [S + 1] int32 rows
    key_starts: Tensor  # [S + 1] int32, in whole blocks
    lengths: Tensor  # [S] int32 keys that count, the chunk's own included
    blocks: Tensor  # [B] int32: those of all sequences, one after the other
    most_queries: int


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
    )


class _Cache(ctypes.Structure):
    _fields_ = (*_Pool._fields_[:-2], _Pool._fields_[-1])


class _Rotation(ctypes.Structure):
    _fields_ = (
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
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


class _Prompts(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("key_starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("q_stride", ctypes.c_int),
        ("group", ctypes.c_int),
    )


class _PromptScores(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("window", ctypes.c_int))


class _Scores(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("window", ctypes.c_int))


class _Target(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("layout", ctypes.c_int), ("first_token", ctypes.c_int))


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
        self._box_maps: dict[tuple[int, ...], Any] = {}  # of layers

    def rotate_and_write(self, qkv: Tensor, sequences: Sequences, layer: PagedLayer, rotation: Rotation) -> None:
        """Norm and rotate the queries of qkv [T, (H + 2 G) * D] in place; keys and values go to the cache."""
        heads = qkv.shape[1] // layer.head_dim
        half = rotation.cosines.shape[1]
        constants = {"FLOAT16": self._is_float16, "DIM": layer.head_dim, "HALF": half, "KV8": int(layer.is_int8)}
        kernel = self._device.kernel("rotate.cu", "rotate_and_write", constants)
        places = (rotation.cosines.data_ptr(), rotation.sines.data_ptr(), pointer(rotation.norm).value)
        how = _Rotation(*places, rotation.eps)
        tokens = (pointer(sequences.positions), pointer(sequences.slots))
        arguments = (pointer(qkv), *tokens, _pool(layer), how, ctypes.c_int(heads - 2 * layer.num_heads))
        self._device.launch(kernel, (-(-heads // WARPS), qkv.shape[0], 1), 32 * WARPS, arguments)

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
        tiles, count = -(-group * sequences.queries // TILE_QUERIES), sequences.tables.shape[0]
        blocks = layer.num_heads * tiles
        most = -(-sequences.tables.shape[1] * layer.block_size // (TURN_KEYS * WARPS))
        splits = max(1, min(MOST_SPLITS, most, TARGET_BLOCKS // (blocks * count)))
        self._reserve(splits * blocks * count, blocks * count, layer.head_dim)
        is_boxed = blocks * count >= BOXED_BLOCKS and self._takes_boxes(layer)
        constants = {
            "FLOAT16": self._is_float16,
            "DIM": layer.head_dim,
            "KV8": int(layer.is_int8),
            "BLOCK": layer.block_size,
            "SOFTCAP": int(scoring.softcap is not None),
            "IN_BOXES": int(is_boxed),
            "STAGES": STAGES,
        }
        kernel = self._device.kernel("attention.cu", "attention", constants)
        parts = (qkv, sequences.positions, sequences.tables)
        strides = (qkv.shape[1], sequences.tables.shape[1])
        queries = _Queries(*(part.data_ptr() for part in parts), *strides, sequences.queries, group)
        scores = _Scores(scoring.scale, scoring.softcap or 0.0, scoring.window or 0)
        boxes = self._boxes(layer, layer.vector_bytes // SLICE_BYTES, 2) if is_boxed else _NO_BOXES
        target = _Target(out.values.data_ptr(), out.layout, first_row)
        scratch = (pointer(self._workspace), pointer(self._counters))
        arguments = (boxes, queries, _cache(layer), scores, target, *scratch)
        shared_bytes = 1024 + WARPS * _ring_bytes(layer) if is_boxed else 0
        self._device.launch(kernel, (splits, blocks, count), 32 * WARPS, arguments, shared_bytes=shared_bytes)

    def takes_chunks(self, layer: PagedLayer, scoring: Scoring) -> bool:
        """Whether `attend_chunks` can."""
        fits = self._takes_boxes(layer) and layer.head_dim in PROMPT_HEAD_DIMS and not layer.is_int8
        return fits and scoring.softcap is None

    def attend_chunks(self, qkv: Tensor, chunks: Chunks, layer: PagedLayer, scoring: Scoring, out: Tensor) -> None:
        """out [T, H * D] of long chunks of rotated queries in qkv [T, (H + 2 G) * D]; their keys are cached. See `takes_chunks`."""
        sizes = {"DIM": layer.head_dim, "BLOCK": layer.block_size, "STAGES": PROMPT_STAGES}
        kernel = self._device.kernel("prompt.cu", "prompt", {"FLOAT16": self._is_float16, **sizes})
        heads = out.shape[1] // layer.head_dim
        parts = (chunks.query_starts, chunks.key_starts, chunks.lengths, chunks.blocks)
        numbers = (qkv.stride(0), heads // layer.num_heads)
        prompts = _Prompts(qkv.data_ptr(), *(part.data_ptr() for part in parts), *numbers)
        scores = _PromptScores(scoring.scale, scoring.window or 0)
        arguments = (self._boxes(layer, 1, 1), prompts, scores, pointer(out), ctypes.c_int(out.stride(0)))
        grid = (heads, -(-chunks.most_queries // PROMPT_QUERIES), len(chunks.lengths))
        shared_bytes = 1024 + PROMPT_STAGES * 2 * PROMPT_KEYS * layer.vector_bytes
        self._device.launch(kernel, grid, PROMPT_THREADS, arguments, shared_bytes=shared_bytes)

    def _takes_boxes(self, layer: PagedLayer) -> bool:
        fits = layer.block_size % TURN_KEYS == 0 and layer.vector_bytes % SLICE_BYTES == 0
        return self._device.has_warpgroups and fits

    def _boxes(self, layer: PagedLayer, slices: int, kinds: int) -> Any:
        """A layer's keys and values in boxes of 16 tokens: `slices` of 128 bytes of a head's vector, of keys (1) or both (2)."""
        key = (layer.pool.data_ptr(), layer.keys, slices, kinds)
        if key not in self._box_maps:
            rows, of_token = layer.pool.shape, layer.num_heads * layer.vector_bytes
            sizes = (SLICE_BYTES, layer.block_size, of_token // SLICE_BYTES, 2, rows[0])
            strides = (of_token, SLICE_BYTES, layer.values - layer.keys, rows[1])
            box = (SLICE_BYTES, TURN_KEYS, slices, kinds, 1)
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


def _pool(layer: PagedLayer) -> _Pool:
    offsets = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return _Pool(layer.pool.data_ptr(), layer.pool.shape[1], *offsets, layer.block_size, layer.num_heads)


def _cache(layer: PagedLayer) -> _Cache:
    offsets = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    return _Cache(layer.pool.data_ptr(), layer.pool.shape[1], *offsets, layer.num_heads)


def _ring_bytes(layer: PagedLayer) -> int:
    """What a warp keeps on its way: boxes of keys and values."""
    return STAGES * 2 * TURN_KEYS * layer.vector_bytes
