"""The contract of every KV codec on the wire: error bound, independence of how a prompt is cut, never silently wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from wire_tables import correlated, rope_of, table_for

from triblade.errors import WireError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout, LayerGroup
from triblade.kv.wire import WireCodec, WireSpan, codec_of
from triblade.kv.wire_rotation import Rotation
from triblade.registry import WIRE_CODECS

ROPE = rope_of(2, 16)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=16, block_size=4, codec="float32", model_hash="m", rope=ROPE)
BLOCKS = [5, 0, 6, 2, 1]
# Largest error relative to the largest number of a vector.
ERROR_BOUND = {"raw": 0.0, "int8": 1 / 250, "pca-lut": 0.05}


@pytest.fixture(params=sorted(WIRE_CODECS))
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def filled(layout: KVLayout, tokens: int = 20, blocks: Sequence[int] = BLOCKS) -> KVCache:
    """A cache with keys and values of `tokens` tokens in `blocks`."""
    cache = KVCache(layout, 8, torch.float32)
    size = layout.block_size
    slots = torch.tensor([blocks[t // size] * size + t % size for t in range(tokens)])
    group = layout.target
    x = correlated(group.num_layers, group.num_kv_heads * group.head_dim, tokens, seed=1)
    keys, values = x.unflatten(3, (group.num_kv_heads, group.head_dim)).unbind(1)
    Rotation(layout.rope).apply(keys, torch.arange(tokens))
    for layer in range(group.num_layers):
        cache.write(layer, slots, keys[layer], values[layer])
    if layout.draft:
        shape = (2, tokens, layout.draft.num_kv_heads, layout.draft.head_dim)
        for layer in range(layout.draft.num_layers):
            cache.draft().write(layer, slots, *torch.randn(shape, generator=torch.Generator().manual_seed(layer)))
    return cache


def codec(name: str, layout: KVLayout) -> WireCodec:
    made: WireCodec = WIRE_CODECS[name](
        layout, table_for(replace(layout, draft=None, codec="any", arrangement="tokens"))
    )
    return made


def whole(tokens: int) -> WireSpan:
    return WireSpan(0, tokens, tokens)


def read(cache: KVCache, layer: int, tokens: int, blocks: Sequence[int] = BLOCKS) -> Tensor:
    """Keys and values [2, T, G, D]."""
    return torch.cat(cache.read(layer, torch.tensor([list(blocks)])))[:, :tokens]


def sent(name: str, source: KVCache, target: KVCache, span: WireSpan, blocks: Sequence[int] = BLOCKS) -> bytes:
    payload = codec(name, source.layout).encode(source, blocks, span)
    codec(name, target.layout).decode(target, blocks, span, payload)
    return payload


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 17, 20])  # G11: shorter than a block, one block, one more
def test_error_bound(name: str, tokens: int) -> None:
    blocks = BLOCKS[: LAYOUT.blocks_for(tokens)]
    source, target = filled(LAYOUT, tokens), KVCache(LAYOUT, 8, torch.float32)
    sent(name, source, target, whole(tokens), blocks)
    for layer in range(2):
        exact, rebuilt = (read(cache, layer, tokens, blocks) for cache in (source, target))
        assert ((rebuilt - exact).abs() <= exact.abs().amax(-1, keepdim=True) * ERROR_BOUND[name]).all()
    untouched = [b for b in range(8) if b not in blocks]
    assert (target.pool[untouched] == 0).all()


def test_how_a_prompt_is_cut_does_not_matter(name: str) -> None:
    source, together, apart = filled(LAYOUT, 18), KVCache(LAYOUT, 8, torch.float32), KVCache(LAYOUT, 8, torch.float32)
    sent(name, source, together, whole(18))
    for i, block in enumerate(BLOCKS):
        sent(name, source, apart, WireSpan(4 * i, min(4, 18 - 4 * i), 18), [block])
    if name == "pca-lut":  # sums of products differ in the last place, and by a level where that crosses a border
        pairs = [(read(together, layer, 18), read(apart, layer, 18)) for layer in range(2)]
        assert all(torch.isclose(one, other, atol=1e-4).float().mean() > 0.99 for one, other in pairs)
        assert all((one - other).abs().max() < 0.05 * one.abs().max() for one, other in pairs)
    else:
        assert torch.equal(together.pool, apart.pool)


def test_sender_and_receiver_number_their_blocks_for_themselves(name: str) -> None:
    source, target = filled(LAYOUT), KVCache(LAYOUT, 8, torch.float32)
    payload = codec(name, LAYOUT).encode(source, BLOCKS, whole(20))
    codec(name, LAYOUT).decode(target, [7, 3, 4, 0, 1], whole(20), payload)
    same = KVCache(LAYOUT, 8, torch.float32)
    codec(name, LAYOUT).decode(same, BLOCKS, whole(20), payload)
    assert torch.equal(read(target, 1, 20, [7, 3, 4, 0, 1]), read(same, 1, 20))


def test_a_payload_says_which_codec_made_it(name: str) -> None:
    assert codec_of(codec(name, LAYOUT).encode(filled(LAYOUT), BLOCKS, whole(20))) == name
    with pytest.raises(WireError, match="no KV rows"):
        codec_of(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("at", [0, 5, 30, 60, 64, 200, -1])
def test_a_flipped_bit_is_found_and_nothing_is_stored(name: str, at: int) -> None:
    payload = bytearray(codec(name, LAYOUT).encode(filled(LAYOUT), BLOCKS, whole(20)))
    payload[at] ^= 4
    target = KVCache(LAYOUT, 8, torch.float32)
    with pytest.raises(WireError):
        codec(name, LAYOUT).decode(target, BLOCKS, whole(20), bytes(payload))
    assert (target.pool == 0).all()


@pytest.mark.parametrize("length", [0, 3, 40, 63, 64, 65, -1])
def test_a_payload_cut_short_is_found(name: str, length: int) -> None:
    payload = codec(name, LAYOUT).encode(filled(LAYOUT), BLOCKS, whole(20))
    target = KVCache(LAYOUT, 8, torch.float32)
    for damaged in (payload[:length], payload + b"\0"):
        with pytest.raises(WireError):
            codec(name, LAYOUT).decode(target, BLOCKS, whole(20), damaged)
    assert (target.pool == 0).all()


@pytest.mark.parametrize(
    ("span", "named"),
    [
        (WireSpan(4, 20, 24), "first token: 0, expected 4"),
        (WireSpan(0, 19, 20), "number of tokens: 20, expected 19"),
        (WireSpan(0, 20, 21), "prompt length: 20, expected 21"),
    ],
)
def test_rows_of_other_tokens_are_refused(name: str, span: WireSpan, named: str) -> None:
    payload = codec(name, LAYOUT).encode(filled(LAYOUT), BLOCKS, whole(20))
    with pytest.raises(WireError, match=named):
        codec(name, LAYOUT).decode(KVCache(LAYOUT, 8, torch.float32), BLOCKS, span, payload)


@pytest.mark.parametrize("changes", [{"model_hash": "n"}, {"rope": rope_of(2, 16, 500.0)}, {"block_size": 2}])
def test_rows_of_another_model_are_refused(name: str, changes: dict[str, object]) -> None:  # G08, G09
    payload = codec(name, LAYOUT).encode(filled(LAYOUT, 8), [0, 1], WireSpan(0, 8, 8))
    other = replace(LAYOUT, **changes)  # type: ignore[arg-type]
    blocks = range(other.blocks_for(8))
    with pytest.raises(WireError, match=r"model or layout|number of blocks"):
        codec(name, other).decode(KVCache(other, 8, torch.float32), blocks, WireSpan(0, 8, 8), payload)


def test_rows_of_another_codec_are_refused(name: str) -> None:
    others = [other for other in WIRE_CODECS if other != name]
    payload = codec(name, LAYOUT).encode(filled(LAYOUT), BLOCKS, whole(20))
    for other in others:
        with pytest.raises(WireError, match=f"another codec: {name.replace('-', '.')}"):
            codec(other, LAYOUT).decode(KVCache(LAYOUT, 8, torch.float32), BLOCKS, whole(20), payload)


@pytest.mark.parametrize(("sender", "receiver"), [("bfloat16", "int8"), ("int8", "float16"), ("float16", "bfloat16")])
def test_only_raw_needs_equal_dtypes(name: str, sender: str, receiver: str) -> None:
    source = filled(replace(LAYOUT, codec=sender))
    target = KVCache(replace(LAYOUT, codec=receiver), 8, torch.float32)
    if name == "raw":
        with pytest.raises(WireError, match="another model or layout"):
            sent(name, source, target, whole(20))
        return
    sent(name, source, target, whole(20))
    exact, rebuilt = read(source, 1, 20), read(target, 1, 20)
    assert ((rebuilt - exact).abs() <= exact.abs().amax(-1, keepdim=True) * (ERROR_BOUND[name] + 0.01)).all()


def test_int8_stores_what_the_receiver_would_have_stored_itself() -> None:
    exact = filled(replace(LAYOUT, codec="bfloat16"))
    target, local = (KVCache(replace(LAYOUT, codec="int8"), 8, torch.float32) for _ in range(2))
    sent("int8", exact, target, whole(20))
    slots = torch.tensor([BLOCKS[t // 4] * 4 + t % 4 for t in range(20)])
    for layer in range(2):
        local.write(layer, slots, *read(exact, layer, 20))
    assert torch.equal(target.pool, local.pool)
    again = KVCache(target.layout, 8, torch.float32)
    sent("int8", target, again, whole(20))
    assert torch.equal(again.pool, target.pool)


def test_layouts_of_tiles_and_of_tokens_exchange_what_is_not_raw() -> None:
    tiles = replace(LAYOUT, block_size=16, arrangement="tiles", codec="int8")
    plain = replace(tiles, arrangement="tokens", codec="bfloat16")
    source, target = filled(tiles, 20, [3, 1]), KVCache(plain, 8, torch.float32)
    sent("int8", source, target, whole(20), [3, 1])
    expected = read(source, 0, 20, [3, 1]).bfloat16().float()
    assert torch.equal(read(target, 0, 20, [3, 1]), expected)


DRAFT = LayerGroup(num_layers=1, num_kv_heads=2, head_dim=8)


def test_a_drafters_layers_travel_with_the_rows(name: str) -> None:
    layout = replace(LAYOUT, draft=DRAFT)
    source, target = filled(layout), KVCache(layout, 8, torch.float32)
    sent(name, source, target, whole(20))
    exact, rebuilt = (read(cache.draft(), 0, 20) for cache in (source, target))
    assert exact.abs().max() > 0
    assert ((rebuilt - exact).abs() <= exact.abs().amax(-1, keepdim=True) * ERROR_BOUND["int8"]).all()


@pytest.mark.parametrize(("mine", "theirs"), [(DRAFT, None), (None, DRAFT)])
def test_a_drafter_on_one_side_only_is_no_obstacle_to_codecs(
    mine: LayerGroup | None, theirs: LayerGroup | None
) -> None:
    source, target = filled(replace(LAYOUT, draft=mine)), KVCache(replace(LAYOUT, draft=theirs), 8, torch.float32)
    sent("int8", source, target, whole(20))
    assert (read(target, 1, 20) - read(source, 1, 20)).abs().max() < 0.1


def test_drafters_of_other_shapes_are_refused() -> None:
    source = filled(replace(LAYOUT, draft=DRAFT))
    target = KVCache(replace(LAYOUT, draft=replace(DRAFT, head_dim=4)), 8, torch.float32)
    with pytest.raises(WireError, match="another shape"):
        sent("int8", source, target, whole(20))
    assert (target.pool == 0).all()
