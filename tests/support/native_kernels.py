"""Tensors in, tensors out: the single kernels of `triblade._native`, so that a test reads like the formula it checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from triblade import _native  # type: ignore[attr-defined]
from triblade.kv.cache import KVCache
from triblade.ops.packing import Format, PackedMatrix, QuantizedMatrix

ISAS: list[str] = _native.isas()
STORE, ADD, SILU, GELU = range(4)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(tensor: Any) -> Tensor:
    return torch.as_tensor(tensor).to(torch.int32).contiguous()


def address(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous()
    return 0 if tensor is None else tensor.data_ptr()


def native_matrix(packed: PackedMatrix) -> Any:
    """The kernels' view of a packed matrix; `packed` must outlive it."""
    parts = (address(part) for part in (packed.weights, packed.scales, packed.offsets, packed.bias))
    return _native.matrix(int(packed.format), packed.num_rows, packed.num_inputs, packed.group, *parts)


def random_codes(
    rows: int, inputs: int, bits: int, group: int, *, offsets: bool = False, bias: bool = False
) -> QuantizedMatrix:
    """A quantized matrix that uses every code, with scales between 0.002 and 0.02."""
    generator = torch.Generator().manual_seed(rows + inputs)
    codes = torch.randint(0, 2**bits, (rows, inputs), generator=generator).to(torch.uint8)
    scales = (torch.rand(rows, inputs // group, generator=generator) * 0.018 + 0.002).half()
    shift = randn(rows, inputs // group, seed=3).half() * 0.1 if offsets else None
    return QuantizedMatrix(
        codes=codes, scales=scales, offsets=shift, bits=bits, bias=randn(rows, seed=4) if bias else None
    )


@dataclass
class Inputs:
    """Room for T rows as a matrix multiplies them, filled by `quantize` or `norm`."""

    tokens: int
    matrix: PackedMatrix
    codes: Tensor = field(init=False)
    scales: Tensor = field(init=False)
    sums: Tensor = field(init=False)
    halves: Tensor = field(init=False)
    floats: Tensor = field(init=False)

    def __post_init__(self) -> None:
        inputs = self.matrix.num_inputs
        groups = inputs // self.matrix.group if self.matrix.group else 0
        self.codes = torch.zeros(self.tokens, inputs, dtype=torch.int8)
        self.scales = torch.zeros(self.tokens, groups)
        self.sums = torch.zeros(self.tokens, groups, dtype=torch.int32)
        self.halves = torch.zeros(self.tokens, inputs, dtype=torch.bfloat16)
        self.floats = torch.zeros(self.tokens, inputs)
        self.native = _native.Activations(*map(address, (self.codes, self.scales, self.sums, self.halves, self.floats)))

    def values(self) -> Tensor:
        """[T, padded in] float32: the numbers that are multiplied."""
        if self.matrix.format == Format.FP32:
            return self.floats
        if self.matrix.format == Format.BF16:
            return self.halves.float()
        return (self.codes.float().unflatten(1, (-1, self.matrix.group)) * self.scales[..., None]).flatten(1)


class Ops:
    """The kernels of one instruction set."""

    def __init__(self, isa: str) -> None:
        self.kernels = _native.kernels(isa)
        assert self.kernels.name == isa

    def quantize(self, x: Tensor, matrix: PackedMatrix) -> Inputs:
        out = Inputs(len(x), matrix)
        self.kernels.quantize(address(x), x.shape[1], native_matrix(matrix), len(x), out.native)
        return out

    def norm(self, x: Tensor, weight: Tensor, matrix: PackedMatrix, eps: float, gather: Tensor | None = None) -> Inputs:
        tokens = len(x if gather is None else gather)
        out = Inputs(tokens, matrix)
        view = native_matrix(matrix)
        self.kernels.norm(address(x), address(weight), eps, x.shape[1], address(gather), view, tokens, out.native)
        return out

    def linear(self, x: Inputs, epilogue: int = STORE, y: Tensor | None = None, members: int = 1) -> Tensor:
        """[T, out], computed by `members` one after the other as a team would side by side."""
        matrix = x.matrix
        gated = epilogue in (SILU, GELU)
        width = matrix.num_rows // 2 if gated else matrix.num_rows
        y = torch.full((x.tokens, width), torch.nan) if y is None else y
        blocks, unit = -(-matrix.num_rows // 16), 2 if gated else 1
        edges = [blocks // unit * member // members * unit for member in range(members)] + [blocks]
        for begin, end in pairwise(edges):
            self.kernels.linear(native_matrix(matrix), x.native, x.tokens, epilogue, (begin, end), address(y), width)
        return y

    def embed(self, table: PackedMatrix, ids: Tensor, scale: float, columns: int) -> Tensor:
        out = torch.empty(len(ids), columns)
        self.kernels.embed(native_matrix(table), address(ids), scale, columns, len(ids), address(out))
        return out

    def norm_add(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
        out = residual.clone()
        self.kernels.norm_add(address(x), address(weight), eps, x.shape[1], len(x), address(out))
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        out = x.clone()
        self.kernels.softcap(address(out), out.numel(), cap)
        return out

    def find_best(self, x: Tensor, part: int) -> int:
        found: int = self.kernels.find_best(address(x), x.numel(), part)
        return found

    def bar(self, x: Tensor, allowed: Tensor) -> Tensor:
        out = x.clone()
        self.kernels.bar(address(out), out.numel(), address(allowed))
        return out

    def weigh(self, x: Tensor, top: float, temperature: float, least: float = 0.0) -> tuple[Tensor, float]:
        out = torch.full_like(x, torch.nan)
        total = self.kernels.weigh(address(x), x.numel(), top, temperature, least, address(out))
        return out, total


def layer_cache(cache: KVCache, layer: int) -> Any:
    """The kernels' view of one layer; `cache` must outlive it."""
    keys, values = cache.layout.planes(layer)
    scales = [plane[1].offset_bytes if len(plane) > 1 else 0 for plane in (keys, values)]
    planes = [keys[0].offset_bytes, values[0].offset_bytes, *scales]
    layout = cache.layout
    kind = {"bfloat16": 0, "int8": 1}[layout.codec]
    pool, row = cache.pool.data_ptr(), layout.row_bytes
    return _native.LayerCache(pool, row, planes, kind, layout.block_size, layout.num_kv_heads, layout.head_dim)
