"""Kernels on the GPU itself, against float32: every way to multiply, and attention over scattered blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_support import CUDA, cuda_device, random_codes
from torch import Tensor

from triblade.engine.cuda_decoder import paged_layer
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.ops.backend import Linear
from triblade.ops.cuda.attention import AttentionKernels, Rotation, Scoring, Sequences
from triblade.ops.cuda.linear import Activations, LinearKernels
from triblade.ops.cuda.packing import DeviceMatrix, pack_codes, pack_dense, unpack
from triblade.ops.cuda.vectors import VectorKernels
from triblade.ops.reference import ReferenceBackend

pytestmark = pytest.mark.gpu
TOKENS = (1, 7, 16, 17, 32, 40, 64, 65, 130, 256, 300)  # every layout, one and several slabs, the library
BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 2e-3}


def error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected).norm() / expected.norm())


def matrix(kind: str, rows: int, inputs: int, dtype: torch.dtype, *, is_gated: bool) -> DeviceMatrix:
    """`kind` is bits and group, `o` with offsets."""
    if kind == "dense":
        weight = torch.randn(rows, inputs, device=CUDA, dtype=dtype) * inputs**-0.5
        return pack_dense(Linear(weight, torch.randn(rows, device=CUDA, dtype=dtype)), is_gated=is_gated)
    bits, group = map(int, kind.rstrip("o").split("g"))
    return pack_codes(random_codes(rows, inputs, group, bits, has_offsets=kind.endswith("o")), dtype, is_gated=is_gated)


@pytest.mark.parametrize("kind", ["4g128", "4g64o", "4g32", "8g128o", "8g32", "dense"])
@pytest.mark.parametrize(("rows", "is_gated"), [(1000, False), (2 * 1536, True), (160, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(kind: str, rows: int, is_gated: bool, dtype: torch.dtype) -> None:
    """With bias; plain ones with a residual in place. Twice, since a race gives another result each time."""
    torch.manual_seed(0)
    inputs = 1152
    packed = matrix(kind, rows, inputs, dtype, is_gated=is_gated)
    weight = unpack(packed)
    kernels, vectors = LinearKernels(cuda_device(), dtype, CUDA), VectorKernels(cuda_device(), dtype, CUDA, 8)
    kernels.reserve([packed])
    for tokens in TOKENS:
        x = torch.randn(tokens, inputs, device=CUDA).to(dtype)
        ordered = kernels.inputs(tokens, inputs)
        vectors.arrange(x, ordered)
        assert packed.bias is not None
        expected = F.linear(x.float(), weight, packed.bias.float())
        before = torch.randn(tokens, rows, device=CUDA).to(dtype)
        results = []
        for _ in range(2):
            out = torch.full((tokens, rows // 2), torch.nan, device=CUDA, dtype=dtype) if is_gated else before.clone()
            kernels.multiply(ordered, packed, out, None if is_gated else out)
            results.append(out)
        wanted = ReferenceBackend().gated_activation(expected, "silu") if is_gated else expected + before.float()
        assert error(results[0], wanted) < BOUNDS[dtype], tokens
        assert torch.equal(*results), tokens


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(28, 4, 128), (9, 3, 64), (8, 1, 256)])  # heads, those of keys, size
@pytest.mark.parametrize("queries", [1, 4, 33])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("copies", [1, 12])
def test_attention(codec: str, shape: tuple[int, int, int], queries: int, window: int | None, copies: int) -> None:
    """Few and many sequences of several lengths in scattered blocks, over what the cache holds; twice, with the same result."""
    torch.manual_seed(0)
    heads, groups, dim = shape
    lengths = [queries, 60, 64, 65, 700, 3001] * copies
    layout = KVLayout(num_layers=2, num_kv_heads=groups, head_dim=dim, block_size=16, codec=codec)
    width = layout.blocks_for(max(lengths))
    cache = KVCache(layout, width * len(lengths), torch.bfloat16, CUDA)
    everything = torch.arange(width * len(lengths) * 16, device=CUDA)
    cache.write(1, everything, *(torch.randn(len(everything), groups, dim, device=CUDA).bfloat16() for _ in "kv"))
    tables = torch.randperm(width * len(lengths), device=CUDA).int().view(len(lengths), width)
    positions = torch.cat([torch.arange(n - queries, n) for n in lengths]).int().to(CUDA)
    slots = torch.cat([t[torch.arange(n - queries, n) // 16] * 16 for t, n in zip(tables, lengths, strict=True)])
    sequences = Sequences(positions=positions, slots=slots + positions % 16, tables=tables, queries=queries)
    qkv = torch.randn(len(positions), (heads + 2 * groups) * dim, device=CUDA).bfloat16()
    kernels, layer = AttentionKernels(cuda_device(), torch.bfloat16, CUDA), paged_layer(cache, 1)
    angles = torch.randn(max(lengths), dim // 2, device=CUDA)
    kernels.rotate_and_write(
        qkv, sequences, layer, Rotation(cosines=angles.cos(), sines=angles.sin(), norm=None, eps=1e-6)
    )
    out, again = (
        Activations(torch.full((len(positions), heads * dim), torch.nan, device=CUDA, dtype=qkv.dtype), 0, 0)
        for _ in range(2)
    )
    for result in (out, again):
        kernels.attend(qkv, sequences, layer, Scoring(scale=dim**-0.5, softcap=None, window=window), result)
    assert torch.equal(out.values, again.values)
    keys, values = (x.float().transpose(1, 2) for x in cache.read(1, tables.long()))
    at = positions.view(-1, queries, 1)
    key = torch.arange(keys.shape[2], device=CUDA)
    mask = (key <= at) & ((key > at - window) if window else True)
    q = qkv.view(len(lengths), queries, -1, dim)[:, :, :heads].float().transpose(1, 2)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.unsqueeze(1), enable_gqa=True)
    assert error(out.values, expected.transpose(1, 2).reshape(len(positions), -1)) < 8e-3
