"""Bytes of KV rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from triblade.kv.layout import CODEC_PLANES, KVLayout, LayerGroup

SMOLLM2 = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, codec="bfloat16", model_hash="m")


@pytest.mark.parametrize(
    ("codec", "expected"), [("float32", 46_080), ("bfloat16", 23_040), ("float16", 23_040), ("int8", 11_880)]
)
def test_bytes_per_token_of_a_known_model(codec: str, expected: int) -> None:
    layout = replace(SMOLLM2, codec=codec)
    assert layout.row_bytes == layout.block_size * expected


@pytest.mark.parametrize("codec", CODEC_PLANES)
@pytest.mark.parametrize(("heads", "dim", "block"), [(3, 64, 16), (1, 5, 3), (8, 128, 1), (2, 80, 32)])
def test_planes_do_not_overlap_and_stay_inside_the_row(codec: str, heads: int, dim: int, block: int) -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=heads, head_dim=dim, block_size=block, codec=codec)
    spans = []
    for layer in range(3):
        for plane in (*layout.planes(layer)[0], *layout.planes(layer)[1]):
            assert plane.offset_bytes % plane.spec.item_bytes == 0
            size = block * plane.items_per_token * plane.spec.item_bytes
            spans.append((plane.offset_bytes, plane.offset_bytes + size))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= layout.row_bytes
    assert layout.row_bytes % 64 == 0


def test_fingerprint_covers_every_field() -> None:
    changed = [
        replace(SMOLLM2, num_layers=29),
        replace(SMOLLM2, num_kv_heads=9),
        replace(SMOLLM2, head_dim=32),
        replace(SMOLLM2, block_size=32),
        replace(SMOLLM2, codec="float16"),
        replace(SMOLLM2, model_hash="n"),
        replace(SMOLLM2, weights="int8"),
        replace(SMOLLM2, rope="other"),
    ]
    assert len({layout.fingerprint() for layout in (SMOLLM2, *changed)}) == len(changed) + 1
    assert replace(SMOLLM2).fingerprint() == SMOLLM2.fingerprint()


def test_layers_of_a_draft_lie_behind_the_targets() -> None:
    layout = replace(SMOLLM2, draft=LayerGroup(num_layers=2, num_kv_heads=1, head_dim=32))
    own = KVLayout(num_layers=2, num_kv_heads=1, head_dim=32, block_size=16, codec="bfloat16")
    assert layout.row_bytes == SMOLLM2.row_bytes + own.row_bytes
    for layer in (0, 29):
        assert layout.planes(layer) == SMOLLM2.planes(layer)
    for layer in (0, 1):
        for plane, alone in zip(layout.planes(30 + layer), own.planes(layer), strict=True):
            assert [p.offset_bytes - SMOLLM2.row_bytes for p in plane] == [p.offset_bytes for p in alone]
            assert [p.items_per_token for p in plane] == [p.items_per_token for p in alone]
    assert layout.group(29) == SMOLLM2.target
    assert layout.group(30) == layout.draft
    assert layout.fingerprint() != SMOLLM2.fingerprint()
