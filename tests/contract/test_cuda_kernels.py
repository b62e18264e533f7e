"""The CUDA kernels' own sources, run on the host by an emulation: each against plain torch, over the shapes and options it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_models import CPU, kernel_folder, relative
from emulated_device import EmulatedDevice
from torch import Tensor

from triblade.engine.cuda_decoder import paged_layer
from triblade.engine.cuda_steps import write_draws
from triblade.engine.executor import GREEDY, Draw
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.models.decoder import window_mask
from triblade.ops.attention import eager_attention
from triblade.ops.backend import AttentionMask, Linear
from triblade.ops.cuda import attention, vectors
from triblade.ops.cuda.attention import AttentionKernels, Rotation, Scoring, Sequences
from triblade.ops.cuda.linear import WIDE, Activations, LinearKernels, Product
from triblade.ops.cuda.packing import DeviceMatrix, pack_codes, pack_dense
from triblade.ops.cuda.tilings import Tiling, WideTiling
from triblade.ops.cuda.vectors import VectorKernels
from triblade.ops.packing import QuantizedMatrix
from triblade.ops.reference import ReferenceBackend
from triblade.sampling_params import SamplingParams
from triblade.spec.sampler import Sampler, SamplerRow

BF16, F16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 6e-3, F16: 8e-4}  # of results, relative; a wrong scale, order or offset is above 0.1


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(kernel_folder(tmp_path_factory))


def integers(rows: int, inputs: int, group: int, bits: int, *, has_offsets: bool) -> QuantizedMatrix:
    scales = (torch.rand(rows, inputs // group) * 0.01 + 0.005).half()
    return QuantizedMatrix(
        codes=torch.randint(0, 1 << bits, (rows, inputs), dtype=torch.uint8),
        scales=scales,
        offsets=(torch.randn(rows, inputs // group) * 0.05).half() if has_offsets else None,
        bits=bits,
        bias=torch.randn(rows),
    )


def matrix_of(
    kind: str, rows: int, inputs: int, dtype: torch.dtype, *, is_gated: bool
) -> tuple[DeviceMatrix, Tensor, Tensor]:
    """A packed matrix with the numbers it stands for and its bias; `kind` is bits and group, `o` with offsets."""
    if kind == "dense":
        weight, bias = (torch.randn(rows, inputs) * 0.1).to(dtype), torch.randn(rows).to(dtype)
        return pack_dense(Linear(weight, bias), is_gated=is_gated), weight.float(), bias.float()
    bits, group = map(int, kind.rstrip("o").split("g"))
    made = integers(rows, inputs, group, bits, has_offsets=kind.endswith("o"))
    assert made.bias is not None
    return pack_codes(made, dtype, is_gated=is_gated), made.dequantize(), made.bias


# kind, rows, tokens, (row tiles, token tiles, warps along rows, along inputs, depth, blocks, splits), type, gated activation
PRODUCTS: list[tuple[str, int, int, tuple[int, ...], torch.dtype, Any]] = [
    ("4g128", 72, 1, (1, 1, 1, 2, 4, 1, 1), BF16, None),  # rows beyond the last whole tile
    ("4g64", 64, 3, (2, 1, 1, 2, 2, 1, 1), BF16, "silu"),
    ("4g32o", 80, 8, (1, 1, 1, 4, 2, 1, 1), BF16, None),
    ("4g128o", 64, 17, (2, 4, 2, 2, 2, 1, 1), BF16, "gelu_tanh"),
    ("8g128", 48, 1, (1, 1, 1, 2, 2, 1, 1), BF16, None),
    ("8g32o", 64, 9, (1, 2, 1, 2, 2, 1, 1), F16, "silu"),
    ("4g128", 40, 5, (1, 1, 1, 2, 2, 1, 1), F16, None),
    ("dense", 72, 1, (1, 1, 1, 4, 2, 1, 1), BF16, None),
    ("dense", 64, 11, (2, 2, 2, 2, 2, 1, 1), BF16, "silu"),
    ("4g64", 72, 64, (2, 8, 2, 1, 2, 1, 3), BF16, None),  # blocks share the inputs
    ("4g128", 144, 70, (1, 8, 1, 2, 2, 1, 2), BF16, None),  # two slabs of tokens
]


# The same with (warpgroups, token tiles, depth, blocks, splits).
WIDE_PRODUCTS: list[tuple[str, int, int, tuple[int, ...], torch.dtype, Any]] = [
    ("4g128", 72, 33, (1, 8, 4, 1, 1), BF16, None),  # fewer rows than four warps have, in part
    ("4g64", 192, 17, (2, 4, 2, 1, 1), BF16, "silu"),  # a block without rows of its own
    ("4g32o", 80, 64, (1, 8, 2, 1, 2), BF16, None),  # blocks share the inputs
    ("4g128o", 64, 40, (1, 8, 4, 1, 1), F16, "gelu_tanh"),
    ("8g128", 48, 20, (1, 4, 2, 1, 1), BF16, None),
    ("8g32o", 64, 30, (1, 4, 2, 1, 1), F16, "silu"),
    ("dense", 72, 50, (1, 8, 2, 1, 4), BF16, None),
    ("4g64", 144, 70, (3, 8, 4, 1, 1), BF16, None),  # two slabs of tokens
]


@pytest.mark.parametrize("case", [*PRODUCTS, *WIDE_PRODUCTS], ids=str)
def test_product(device: EmulatedDevice, case: tuple[Any, ...]) -> None:
    kind, rows, tokens, cut, dtype, activation = case
    torch.manual_seed(1)
    inputs, is_gated = 384, activation is not None
    packed, weight, bias = matrix_of(kind, rows, inputs, dtype, is_gated=is_gated)
    kernels, vectors = LinearKernels(device, dtype, CPU), VectorKernels(device, dtype, CPU, 8)
    kernels._partial = torch.full((2**17,), torch.nan)
    x = torch.randn(tokens, inputs).to(dtype)
    tiling = WideTiling(*cut) if len(cut) == 5 else Tiling(*cut)
    layout = tiling.token_tiles | (WIDE if len(cut) == 5 else 0)
    ordered = Activations.empty(tokens, inputs, layout, dtype, CPU)
    vectors.arrange(x, ordered)
    columns = rows // 2 if is_gated else rows
    residual = None if is_gated else torch.randn(tokens, columns).to(dtype)
    out = torch.full((tokens, columns), torch.nan, dtype=dtype)
    for slab in range(-(-tokens // 64)):
        kernels.stream(Product(ordered, packed, out, residual, activation or "silu"), tiling, slab)
    expected = F.linear(x.float(), weight, bias)
    if is_gated:
        expected = ReferenceBackend().gated_activation(expected, activation)
    if residual is not None:
        expected += residual.float()
    assert relative(out, expected) < ROUNDING[dtype]


@pytest.mark.parametrize("tokens", [10, 40])
def test_a_product_may_write_the_inputs_of_the_next(device: EmulatedDevice, tokens: int) -> None:
    """The gated result in the layout of inputs, and float32 results for the head."""
    torch.manual_seed(2)
    packed, weight, bias = matrix_of("4g64", 256, 128, BF16, is_gated=True)
    kernels, vectors = LinearKernels(device, BF16, CPU), VectorKernels(device, BF16, CPU, 8)
    x = torch.randn(tokens, 128).to(BF16)
    ordered, inner = kernels.inputs(tokens, 128), kernels.inputs(tokens, 128)
    vectors.arrange(x, ordered)
    kernels.multiply(ordered, packed, inner)
    head, head_weight, head_bias = matrix_of("dense", 40, 128, BF16, is_gated=False)
    logits = torch.full((tokens, 40), torch.nan)
    kernels.multiply(inner, head, logits)
    middle = ReferenceBackend().gated_activation(F.linear(x.float(), weight, bias), "silu").to(BF16)
    assert relative(logits, F.linear(middle.float(), head_weight, head_bias)) < 2e-3


@pytest.mark.parametrize("kind", ["4g128", "4g32o", "8g64", "8g128o"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_many_tokens_take_the_weights_spelled_out(device: EmulatedDevice, kind: str, is_gated: bool) -> None:
    torch.manual_seed(3)
    packed, weight, bias = matrix_of(kind, 96, 256, BF16, is_gated=is_gated)
    kernels = LinearKernels(device, BF16, CPU)
    kernels.reserve([packed])
    assert relative(kernels.dequantize(packed), weight) < 3e-3
    x = Activations(torch.randn(300, 256).to(BF16), 300, 0)
    residual = None if is_gated else torch.randn(300, 96).to(BF16)
    out = torch.full((300, 48 if is_gated else 96), torch.nan, dtype=BF16)
    kernels.multiply(x, packed, out, residual)
    expected = F.linear(x.values.float(), weight, bias)
    expected = (
        ReferenceBackend().gated_activation(expected, "silu") if residual is None else expected + residual.float()
    )
    assert relative(out, expected) < 1e-2


@dataclass(frozen=True)
class Case:
    """Attention over a cache."""

    heads: int
    groups: int
    dim: int
    lengths: tuple[int, ...]  # keys of each sequence, this step's included
    queries: int = 1
    codec: str = "bfloat16"
    dtype: torch.dtype = BF16
    window: int | None = None
    softcap: float | None = None
    has_norm: bool = False
    half: int = 32  # rotated pairs
    block: int = 16
    is_boxed: bool = False  # as for many sequences


CASES = [
    Case(7, 1, 64, (5,)),
    Case(14, 2, 128, (70, 300)),  # several splits, merged by the last
    Case(4, 2, 64, (40, 130), queries=3, codec="int8", has_norm=True),
    Case(8, 2, 128, (200,), queries=5, codec="float16", dtype=F16, window=50),
    Case(4, 1, 256, (33, 260), softcap=20.0, half=64),
    Case(8, 2, 64, (100,), queries=33, codec="int8", dtype=F16, window=20, softcap=5.0),  # several tiles of rows
    Case(6, 2, 64, (200,), codec="int8", block=4),
    Case(9, 3, 64, (17, 2, 90), queries=2, block=4, half=16),
    Case(14, 2, 128, (70, 300), is_boxed=True),
    Case(4, 2, 128, (40, 130), queries=3, codec="int8", is_boxed=True),
    Case(4, 1, 256, (33, 260), queries=5, window=50, half=64, is_boxed=True),  # several tiles of rows
    Case(8, 1, 128, (70, 9, 300), queries=2, codec="int8", is_boxed=True),
    Case(6, 3, 64, (17, 2, 90), window=30, softcap=9.0, is_boxed=True),
    Case(10, 5, 64, (40, 700), dtype=F16, codec="float16", block=32, is_boxed=True),
    Case(8, 4, 256, (33, 100, 5), codec="int8", window=48, half=64, is_boxed=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(device: EmulatedDevice, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, rotation, cache write and attention, against the reference over the same cache."""
    monkeypatch.setattr(attention, "BOXED_BLOCKS", 0 if case.is_boxed else 10**9)
    torch.manual_seed(4)
    caches, tables = filled_caches(case)
    positions = torch.cat([torch.arange(n - case.queries, n) for n in case.lengths])
    slots = torch.cat([slots_of(t, n - case.queries, n, case.block) for t, n in zip(tables, case.lengths, strict=True)])
    qkv = torch.randn(len(positions), (case.heads + 2 * case.groups) * case.dim).to(case.dtype)
    angles = torch.randn(max(case.lengths), case.half)
    norm = torch.rand(case.heads + case.groups, case.dim) + 0.5 if case.has_norm else None
    expected_q, expected = reference_attention(case, caches[0], tables, positions, slots, (qkv, angles, norm))

    kernels, layer = AttentionKernels(device, case.dtype, CPU), paged_layer(caches[1], 1)
    sequences = Sequences(positions=positions.int(), slots=slots.int(), tables=tables.int(), queries=case.queries)
    rotation = Rotation(cosines=angles.cos(), sines=angles.sin(), norm=norm, eps=1e-6)
    kernels.rotate_and_write(qkv, sequences, layer, rotation)
    rotated = qkv.view(len(positions), -1, case.dim)[:, : case.heads]
    assert relative(rotated, expected_q) < ROUNDING[case.dtype]
    for ours, theirs in zip(caches[1].read(1, tables), caches[0].read(1, tables), strict=True):
        assert relative(ours, theirs) < ROUNDING[case.dtype]
    out = Activations(
        torch.full((len(positions), case.heads * case.dim), torch.nan, dtype=case.dtype), len(positions), 0
    )
    scoring = Scoring(scale=case.dim**-0.5, softcap=case.softcap, window=case.window)
    kernels.attend(qkv, sequences, layer, scoring, out)
    assert relative(out.values, expected) < 2 * ROUNDING[case.dtype]
    assert not kernels._counters.any()


@dataclass(frozen=True)
class LongCase:
    """Long chunks that attend together."""

    heads: int
    groups: int
    dim: int
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    dtype: torch.dtype = BF16
    window: int | None = None
    block: int = 16


LONG_CASES = [
    LongCase(2, 1, 64, (200, 131), (200, 1)),  # a whole prompt, and one token of another
    LongCase(3, 3, 64, (310,), (130,), window=40, dtype=F16, block=32),
    LongCase(2, 1, 128, (90, 150), (70, 150)),
]


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_attention_of_long_chunks(device: EmulatedDevice, case: LongCase) -> None:
    """Over what the cache holds; behind the last key it holds what is not a number."""
    torch.manual_seed(8)
    history = Case(
        case.heads, case.groups, case.dim, case.lengths, codec=str(case.dtype)[6:], dtype=case.dtype, block=case.block
    )
    (cache, _), tables = filled_caches(history)
    blocks = [-(-length // case.block) for length in case.lengths]
    used = [slots_of(t, 0, n, case.block) for t, n in zip(tables, case.lengths, strict=True)]
    everything = torch.zeros(cache.num_blocks * case.block, dtype=torch.bool).index_fill(0, torch.cat(used), True)
    nothing = (~everything).nonzero().flatten()
    vectors_shape = (case.groups, case.dim)
    cache.write(1, torch.cat(used), *(torch.randn(sum(case.lengths), *vectors_shape).to(case.dtype) for _ in "kv"))
    cache.write(1, nothing, *(torch.full((len(nothing), *vectors_shape), torch.nan, dtype=case.dtype) for _ in "kv"))
    qkv = torch.randn(sum(case.queries), (case.heads + 2 * case.groups) * case.dim).to(case.dtype)
    starts = np.cumsum(([0, *case.queries], [0, *(count * case.block for count in blocks)]), axis=1, dtype=np.int32)
    chunks = attention.Chunks(
        query_starts=torch.from_numpy(starts[0]),
        key_starts=torch.from_numpy(starts[1].copy()),
        lengths=torch.tensor(case.lengths, dtype=torch.int32),
        blocks=torch.cat([t[:count] for t, count in zip(tables, blocks, strict=True)]).int(),
        most_queries=max(case.queries),
    )
    out = torch.full((sum(case.queries), case.heads * case.dim), torch.nan, dtype=case.dtype)
    kernels, scoring = AttentionKernels(device, case.dtype, CPU), Scoring(scale=0.1, softcap=None, window=case.window)
    assert kernels.takes_chunks(paged_layer(cache, 1), scoring)
    kernels.attend_chunks(qkv, chunks, paged_layer(cache, 1), scoring, out)
    row = 0
    for table, length, queries in zip(tables, case.lengths, case.queries, strict=True):
        keys, values = (x[:, :length].float() for x in cache.read(1, table.unsqueeze(0)))
        positions = torch.arange(length - queries, length).unsqueeze(0)
        mask = window_mask(positions, length, case.window).explicit(queries, length, CPU)
        q = qkv[row : row + queries].view(1, queries, -1, case.dim)[:, :, : case.heads].float()
        expected = eager_attention(q, keys, values, AttentionMask(mask), 0.1, None)
        assert relative(out[row : row + queries], expected.reshape(queries, -1)) < 2 * ROUNDING[case.dtype]
        row += queries


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_what_lies_behind_a_sequence_is_not_seen(
    device: EmulatedDevice, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a block may hold what is not a number: somebody else's, from before."""
    monkeypatch.setattr(attention, "BOXED_BLOCKS", 0)
    case = Case(4, 2, 128, (21, 3, 40), codec=codec)
    caches, tables = filled_caches(case)
    layout, count = caches[0].layout, caches[0].num_blocks * case.block
    used = torch.cat([slots_of(t, 0, n, case.block) for t, n in zip(tables, case.lengths, strict=True)])
    unused = torch.ones(count, dtype=torch.bool).index_fill(0, used, False).nonzero().flatten()
    nothing = torch.full((len(unused), case.groups, case.dim), torch.nan, dtype=BF16)
    if codec == "int8":
        for planes in layout.planes(1):
            scales = caches[1].pool.view(torch.float16)[:, planes[1].offset_bytes // 2 :][:, : case.block * case.groups]
            scales.view(-1, case.block, case.groups)[unused // case.block, unused % case.block] = torch.nan
    else:
        caches[1].write(1, unused, nothing, nothing)
    qkv = torch.randn(3, (case.heads + 2 * case.groups) * case.dim).to(BF16)
    positions = torch.tensor(case.lengths, dtype=torch.int32) - 1
    sequences = Sequences(positions=positions, slots=positions, tables=tables.int(), queries=1)
    results = []
    for cache in caches:
        out = Activations(torch.empty(3, case.heads * case.dim, dtype=BF16), 3, 0)
        scoring = Scoring(scale=0.1, softcap=None, window=None)
        AttentionKernels(device, BF16, CPU).attend(qkv, sequences, paged_layer(cache, 1), scoring, out)
        results.append(out.values)
    assert torch.equal(*results)


def filled_caches(case: Case) -> tuple[list[KVCache], Tensor]:
    """Two caches with the same history in scattered blocks, and the block tables."""
    layout = KVLayout(
        num_layers=2,
        num_kv_heads=case.groups,
        head_dim=case.dim,
        block_size=case.block,
        codec=case.codec,
    )
    counts = [layout.blocks_for(n) for n in case.lengths]
    caches = [KVCache(layout, sum(counts) + 1, case.dtype) for _ in range(2)]
    order = iter((torch.randperm(sum(counts)) + 1).split(counts))
    tables = torch.zeros(len(counts), max(counts), dtype=torch.long)
    for number, (count, length) in enumerate(zip(counts, case.lengths, strict=True)):
        tables[number, :count] = next(order)
        history = length - case.queries
        k, v = (torch.randn(history, case.groups, case.dim).to(case.dtype) for _ in "kv")
        for cache in caches:
            cache.write(1, slots_of(tables[number], 0, history, case.block), k, v)
    return caches, tables


def slots_of(table: Tensor, start: int, stop: int, block: int) -> Tensor:
    positions = torch.arange(start, stop)
    return table[positions // block] * block + positions % block


def reference_attention(
    case: Case,
    cache: KVCache,
    tables: Tensor,
    positions: Tensor,
    slots: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Rotated queries [T, H, D] and results [T, H * D]; this step's keys are written."""
    qkv, angles, norm = inputs
    ops = ReferenceBackend(eager_attention)
    tokens, sequences = len(positions), len(case.lengths)
    qk, v = qkv.view(tokens, -1, case.dim).split((case.heads + case.groups, case.groups), 1)
    if norm is not None:
        qk = (ops.rms_norm(qk.float(), torch.ones(case.dim), 1e-6) * norm).to(case.dtype)
    rotated = ops.rope(qk, angles[positions].cos(), angles[positions].sin())
    q, k = rotated.split((case.heads, case.groups), 1)
    cache.write(1, slots, k, v)
    longest = max(case.lengths)
    keys, values = (x[:, :longest].float() for x in cache.read(1, tables))
    mask = window_mask(positions.view(sequences, -1), longest, case.window).explicit(case.queries, longest, CPU)
    grouped = q.float().reshape(sequences, case.queries, case.heads, case.dim)
    out = eager_attention(grouped, keys, values, AttentionMask(mask), case.dim**-0.5, case.softcap)
    return q, out.reshape(tokens, -1)


def test_places_that_nobody_takes_change_nothing(device: EmulatedDevice) -> None:
    """A recorded step is wider than its sequences."""
    torch.manual_seed(5)
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, codec="bfloat16")
    cache = KVCache(layout, 2, BF16)
    before = cache.pool.clone()
    nobody = torch.full((2,), -1, dtype=torch.int32)
    sequences = Sequences(positions=nobody, slots=nobody, tables=torch.zeros(2, 1, dtype=torch.int32), queries=1)
    kernels, layer = AttentionKernels(device, BF16, CPU), paged_layer(cache, 0)
    qkv, angle = torch.randn(2, 4 * 64).to(BF16), torch.zeros(4, 32)
    kernels.rotate_and_write(qkv, sequences, layer, Rotation(cosines=angle, sines=angle, norm=None, eps=1e-6))
    out = Activations(torch.full((2, 2 * 64), 7.0, dtype=BF16), 2, 0)
    kernels.attend(qkv, sequences, layer, Scoring(scale=0.125, softcap=None, window=None), out)
    assert torch.equal(cache.pool, before)
    assert bool((out.values == 7.0).all())


@pytest.mark.parametrize("width", [64, 576, 2056])
def test_norms(device: EmulatedDevice, width: int) -> None:
    """With and without a normed summand before it; in both layouts."""
    torch.manual_seed(6)
    kernels, ops = VectorKernels(device, BF16, CPU, 8), ReferenceBackend()
    x, added = (torch.randn(3, width).to(BF16) for _ in range(2))
    weight, added_weight = (torch.rand(width) for _ in range(2))
    plain = Activations(torch.empty_like(x), 3, 0)
    kernels.rms_norm(x, weight, 1e-5, plain)
    assert relative(plain.values, ops.rms_norm(x, weight, 1e-5)) < 1e-3
    for layout in (1, 4 | WIDE) if width % 64 == 0 else ():
        tiled, again = (Activations.empty(3, width, layout, BF16, CPU) for _ in range(2))
        kernels.rms_norm(x, weight, 1e-5, tiled)
        kernels.arrange(plain.values, again)
        assert torch.equal(tiled.values, again.values)
    summed = x.clone()
    kernels.rms_norm(summed, weight, 1e-5, plain, (added, added_weight))
    expected = x + ops.rms_norm(added, added_weight, 1e-5)
    assert relative(summed, expected) < 4e-3
    assert relative(plain.values, ops.rms_norm(summed, weight, 1e-5)) < 1e-3


@pytest.mark.parametrize("width", [64, 328])
def test_norms_of_many_rows(device: EmulatedDevice, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp each; the last block has fewer."""
    monkeypatch.setattr(vectors, "MANY_ROWS", 11)
    torch.manual_seed(6)
    kernels, ops = VectorKernels(device, BF16, CPU, 8), ReferenceBackend()
    x, added = (torch.randn(11, width).to(BF16) for _ in range(2))
    weight, added_weight = (torch.rand(width) for _ in range(2))
    out, summed = Activations(torch.empty_like(x), 11, 0), x.clone()
    kernels.rms_norm(summed, weight, 1e-5, out, (added, added_weight))
    assert relative(summed, x + ops.rms_norm(added, added_weight, 1e-5)) < 4e-3
    assert relative(out.values, ops.rms_norm(summed, weight, 1e-5)) < 1e-3


def test_embedding(device: EmulatedDevice) -> None:
    table = torch.randn(100, 64).to(BF16)
    out = torch.empty(3, 64, dtype=BF16)
    VectorKernels(device, BF16, CPU, 8).embed(table, torch.tensor([5, 99, -1], dtype=torch.int32), 2.0, out)
    assert torch.equal(out, table[[5, 99, 0]] * 2)


@pytest.mark.parametrize("columns", [1000, 997])
def test_best_token(device: EmulatedDevice, columns: int) -> None:
    """The smallest id among equals, the vocabulary's end, rows that are not finite, and the soft cap; rows in fours and not."""
    torch.manual_seed(7)
    kernels = VectorKernels(device, BF16, CPU, 8)
    logits, best = torch.randn(5, columns), torch.empty(5, dtype=torch.int32)
    logits[0, 7] = logits[0, 3] = 9.0
    logits[1, 900], logits[2, 0] = torch.nan, -torch.inf
    logits[3, 995] = 50.0
    kernels.best_token(logits, 990, None, best)
    assert best.tolist() == [3, -1, -1, int(logits[3, :990].argmax()), int(logits[4, :990].argmax())]
    capped = logits.clone()
    kernels.best_token(capped, 990, 3.0, best)
    assert best[1] == -1
    torch.testing.assert_close(capped[4, :990], torch.tanh(logits[4, :990] / 3) * 3)


def test_drawn_tokens(device: EmulatedDevice) -> None:
    """Those of the sampler, seed for seed; greedy rows and rows that are not finite keep their best token."""
    torch.manual_seed(9)
    count, vocabulary = 40, 990
    logits = torch.randn(count, 1000) * 3
    logits[3, 17] = torch.nan
    params = [
        SamplingParams(temperature=(0.0, 0.6, 1.0, 1.7)[n % 4], min_p=(0.0, 0.05)[n % 3 == 0]) for n in range(count)
    ]
    seeds = [2**63 + 12345 * n for n in range(count)]
    rows = [
        SamplerRow(
            params=p, seed=seed, position=n, prompt_token_ids=[], output_token_ids=[], stop_token_ids=frozenset()
        )
        for n, (p, seed) in enumerate(zip(params, seeds, strict=True))
    ]
    expected = Sampler(vocabulary).sample(logits, rows).token_ids
    kernels = VectorKernels(device, BF16, CPU, count)
    kernels.reserve_draws(vocabulary)
    best, columns = torch.empty(count, dtype=torch.int32), np.zeros((5, count), dtype=np.int32)
    kernels.best_token(logits, vocabulary, None, best)
    greedy = best.tolist()
    draws = [
        Draw(seed, n, p.temperature, p.min_p) if p.temperature else GREEDY
        for n, (p, seed) in enumerate(zip(params, seeds, strict=True))
    ]
    write_draws(columns, enumerate(draws))
    kernels.draw_token(logits, vocabulary, torch.from_numpy(columns), best)
    assert best[3] == -1
    expected[3] = -1
    assert best.tolist() == expected
    assert sum(a != b for a, b in zip(best.tolist(), greedy, strict=True)) > count / 4
    assert not kernels._counters.any()


def test_inputs_of_the_next_step(device: EmulatedDevice) -> None:
    """Going on, at the end of a block, without room, without a token, and nobody."""
    tables = torch.tensor([[3, 5], [4, 1], [2, 0], [6, 7], [0, 0]], dtype=torch.int32)
    inputs = torch.tensor([[9] * 5, [4, 7, 7, 2, -1], [28, 39, 23, 50, -1]], dtype=torch.int32)
    best = torch.tensor([11, 12, 13, -1, 14], dtype=torch.int32)
    num_blocks = torch.tensor([2, 2, 1, 2, 0], dtype=torch.int32)
    drawn = torch.arange(5, dtype=torch.int32)
    VectorKernels(device, BF16, CPU, 8).advance(best, inputs, tables, num_blocks, 8, drawn)
    assert drawn.tolist() == [1, 2, 3, 4, 4]
    assert inputs[1].tolist() == [5, 8, -1, -1, -1]
    assert inputs[2].tolist() == [29, 8, -1, -1, -1]
    assert inputs[0, :2].tolist() == [11, 12]
