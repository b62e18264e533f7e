"""The contract of every KV codec in the registry: error bound, row round trip, independence of chunks and neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from triblade.kv.cache import KVCache
from triblade.kv.layout import CODEC_PLANES, Arrangement, KVLayout, LayerGroup
from triblade.registry import KV_CODECS

# Largest error relative to the largest number of the vector, and absolute.
ERROR_BOUND = {
    "float32": (0.0, 0.0),
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 0.0),
    "int8": ((1 + 2.0**-9) / 254, 2.0**-25),
}


def vectors(tokens: int, heads: int, dim: int, seed: int = 0) -> Tensor:
    """Keys with very different scales per token and one outlier dimension, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=generator)
    x[..., 1] *= 30
    return x * torch.logspace(-5, 2, tokens)[:, None, None]


def cache(codec: str, arrangement: Arrangement = "tokens", block_size: int = 4) -> KVCache:
    layout = KVLayout(
        num_layers=2, num_kv_heads=3, head_dim=16, block_size=block_size, codec=codec, arrangement=arrangement
    )
    return KVCache(layout, 7, torch.float32)


@pytest.fixture(params=sorted(KV_CODECS))
def codec(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_every_codec_has_a_layout() -> None:
    assert set(KV_CODECS) == set(CODEC_PLANES)


def test_error_bound(codec: str) -> None:
    x = vectors(50, 3, 64)
    subject = KV_CODECS[codec]()
    back = subject.decode(subject.encode(x), torch.float32)
    relative, absolute = ERROR_BOUND[codec]
    assert ((back - x).abs() <= x.abs().amax(-1, keepdim=True) * relative + absolute).all()


def test_planes_have_the_types_of_the_layout(codec: str) -> None:
    planes = KV_CODECS[codec]().encode(vectors(5, 3, 16))
    for plane, spec in zip(planes, CODEC_PLANES[codec], strict=True):
        assert str(plane.dtype) == f"torch.{spec.dtype}"
        assert plane.shape == ((5, 3, 16) if spec.per_dimension else (5, 3))


def test_zero_vectors_stay_zero(codec: str) -> None:
    subject = KV_CODECS[codec]()
    assert torch.equal(subject.decode(subject.encode(torch.zeros(2, 3, 8)), torch.float32), torch.zeros(2, 3, 8))


def test_rows_round_trip_through_scattered_blocks(codec: str) -> None:
    subject, x, y = cache(codec), vectors(10, 3, 16), vectors(10, 3, 16, seed=1)
    table = torch.tensor([[5, 0, 3]])
    slots = torch.tensor([table[0, p // 4] * 4 + p % 4 for p in range(10)])
    subject.write(1, slots, x, y)
    keys, values = subject.read(1, table)
    encode = KV_CODECS[codec]()
    assert keys.shape == (1, 12, 3, 16)
    assert torch.equal(keys[0, :10], encode.decode(encode.encode(x), torch.float32))
    assert torch.equal(values[0, :10], encode.decode(encode.encode(y), torch.float32))


def test_layers_and_blocks_do_not_touch_each_other(codec: str) -> None:
    subject, x = cache(codec), vectors(4, 3, 16)
    subject.write(0, torch.arange(8, 12), x, x)
    assert (subject.pool[2] != 0).any()
    untouched = torch.cat((subject.pool[:2], subject.pool[3:]))
    assert (untouched == 0).all()
    assert (subject.read(1, torch.tensor([[2]]))[0] == 0).all()


def test_chunks_do_not_change_what_is_stored(codec: str) -> None:
    whole, pieces, x = cache(codec), cache(codec), vectors(12, 3, 16)
    slots = torch.arange(12)
    whole.write(0, slots, x, x)
    for start in range(0, 12, 5):
        part = slice(start, start + 5)
        pieces.write(0, slots[part], x[part], x[part])
    assert torch.equal(whole.pool, pieces.pool)


def test_a_row_is_all_there_is_to_a_block(codec: str) -> None:  # E17: scales move with the block
    subject, x = cache(codec), vectors(4, 3, 16)
    for layer in range(2):
        subject.write(layer, torch.arange(4), x, x)
    subject.pool[6] = subject.pool[0]
    subject.pool[0] = 0
    encode = KV_CODECS[codec]()
    for layer in range(2):
        keys, _ = subject.read(layer, torch.tensor([[6]]))
        assert torch.equal(keys[0], encode.decode(encode.encode(x), torch.float32))


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("tiled_codec", ["bfloat16", "int8"])
def test_tiles_hold_the_same_as_tokens(tiled_codec: str, block_size: int) -> None:
    plain, tiled = (cache(tiled_codec, name, block_size) for name in ("tokens", "tiles"))
    x, y = vectors(100, 3, 16), vectors(100, 3, 16, seed=1)
    slots = torch.randperm(7 * block_size, generator=torch.Generator().manual_seed(0))[:100]
    for subject in (plain, tiled):
        subject.write(1, slots, x, y)
    table = torch.tensor([[6, 1, 3], [0, 2, 5]])
    for ours, expected in zip(tiled.read(1, table), plain.read(1, table), strict=True):
        assert torch.equal(ours, expected)
    assert not torch.equal(tiled.pool, plain.pool)


def test_a_tile_of_keys_is_in_the_order_of_the_dot_instructions() -> None:
    tiled = cache("int8", "tiles", 16)
    x = torch.zeros(1, 3, 16)
    x[0, 1, 6] = 127.0  # token 5, head 1, dimension 6
    tiled.write(0, torch.tensor([5]), x, x)
    tile = tiled.pool[0, 16 * 16 : 2 * 16 * 16]  # head 1
    assert tile.nonzero().flatten().tolist() == [(6 // 4 * 16 + 5) * 4 + 6 % 4]
    values = tiled.pool[0, 3 * 256 + 256 : 3 * 256 + 512]
    assert values.nonzero().flatten().tolist() == [(5 // 4 * 16 + 6) * 4 + 5 % 4]


@pytest.mark.parametrize("arrangement", ["tokens", "tiles"])
def test_a_draft_has_its_own_layers_in_the_same_rows(codec: str, arrangement: Arrangement) -> None:
    layout = replace(cache(codec, arrangement, 16).layout, draft=LayerGroup(num_layers=1, num_kv_heads=2, head_dim=32))
    whole = KVCache(layout, 3, torch.float32)
    draft = whole.draft()
    slots, table = torch.tensor([5, 40]), torch.tensor([[0, 1, 2]])
    mine, theirs = vectors(2, 2, 32), vectors(2, 3, 16)
    draft.write(0, slots, mine, -mine)
    for layer in (0, 1):
        whole.write(layer, slots, theirs, theirs)
    keys, values = draft.read(0, table)
    alone = KV_CODECS[codec]()
    assert torch.equal(keys[0, slots], alone.decode(alone.encode(mine), torch.float32))
    assert torch.equal(values[0, slots], alone.decode(alone.encode(-mine), torch.float32))
    assert torch.equal(whole.read(1, table)[0][0, slots], alone.decode(alone.encode(theirs), torch.float32))
    assert draft.pool.data_ptr() == whole.pool.data_ptr()
