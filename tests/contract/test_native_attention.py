"""The contract of the native rope, cache writes and attention, on every instruction set that this processor runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from native_kernels import ISAS, Ops, address, integers, layer_cache, randn
from torch import Tensor

from triblade import _native  # type: ignore[attr-defined]
from triblade.kv.cache import KVCache
from triblade.kv.codecs import Int8Codec
from triblade.kv.layout import KVLayout
from triblade.ops.reference import ReferenceBackend

EPS = 1e-6
LAYER = 1


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return Ops(request.param)


@dataclass(frozen=True)
class Shape:
    """Heads of a model, and how it attends."""

    heads: int
    groups: int
    dim: int
    scale: float = 0.2
    softcap: float = 0.0
    window: int = 0

    @property
    def native(self) -> object:
        return _native.AttentionShape(self.heads, self.groups, self.dim, self.scale, self.softcap, self.window)

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.groups) * self.dim


def make_cache(shape: Shape, codec: str, blocks: int, block_size: int) -> KVCache:
    """A pool full of what a former owner left."""
    layout = KVLayout(
        num_layers=2,
        num_kv_heads=shape.groups,
        head_dim=shape.dim,
        block_size=block_size,
        codec=codec,
        arrangement="tiles",
    )
    cache = KVCache(layout, blocks, torch.float32)
    stale = randn(blocks * block_size, shape.groups, shape.dim, seed=9) * 50
    for layer in range(2):
        cache.write(layer, torch.arange(blocks * block_size), stale, stale)
    return cache


# ---- rope and the cache


def rope_write(
    ops: Ops, qkv: Tensor, shape: Shape, cache: KVCache, slots: Tensor, *, pairs: int, norm: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The rotated qkv, and the cosines and sines [T, R] that its tokens were rotated by."""
    angles = torch.arange(64)[:, None] * torch.logspace(0, -2, pairs)
    cos, sin = angles.cos(), angles.sin()
    positions = integers([(7 * t) % 64 for t in range(len(qkv))])
    out, rope, at = qkv.clone(), _native.RopeTable(address(cos), address(sin), pairs), integers(slots)
    ops.kernels.rope_write(
        address(out),
        shape.native,
        address(norm),
        EPS,
        rope,
        address(positions),
        address(at),
        layer_cache(cache, LAYER),
        len(qkv),
    )
    return out, cos[positions], sin[positions]


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize(("dim", "pairs"), [(16, 8), (64, 32), (80, 20), (128, 64)])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
def test_rope_and_what_it_writes(ops: Ops, codec: str, dim: int, pairs: int, normed: bool) -> None:
    shape, tokens = Shape(6, 2, dim), 21
    qkv = randn(tokens, shape.width) * torch.logspace(-3, 2, tokens)[:, None]
    qkv[3] = 0
    weight = randn(shape.heads + shape.groups, dim, seed=1) + 1 if normed else None
    ours, twin = (make_cache(shape, codec, 5, 32) for _ in range(2))
    slots = torch.randperm(5 * 32, generator=torch.Generator().manual_seed(0))[:tokens]
    out, cos, sin = rope_write(ops, qkv, shape, ours, slots, pairs=pairs, norm=weight)
    heads = qkv.view(tokens, -1, dim)
    qk, v = heads[:, : shape.heads + shape.groups], heads[:, shape.heads + shape.groups :]
    if weight is not None:
        qk = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    expected = ReferenceBackend().rope(qk, cos, sin)
    made = out.view(tokens, -1, dim)
    size = qk.abs().amax((1, 2), keepdim=True)
    assert ((made[:, : shape.heads + shape.groups] - expected).abs() <= 1e-6 * size + 1e-9).all()
    assert torch.equal(made[:, shape.heads + shape.groups :], v)
    # What is stored is what the codec in Python makes of the same numbers, bit for bit, and nothing else changed.
    twin.write(LAYER, slots, made[:, shape.heads : shape.heads + shape.groups], v)
    assert torch.equal(ours.pool, twin.pool)


def test_int8_codes_are_those_of_the_codec(ops: Ops) -> None:  # E17
    """Tiny, huge and zero vectors, and ones whose scale is on the edge of what float16 rounds."""
    shape = Shape(2, 2, 16)
    exponents = torch.linspace(-9, 5, 400)
    qkv = randn(400, shape.width) * 10 ** exponents[:, None]
    qkv[::9, -32:] *= 0
    qkv[1::9, -1] = 127 * (1 + 2.0**-11) * 2.0 ** torch.arange(-14, 31).float()[: len(qkv[1::9])].clamp(max=14)
    ours, twin = (make_cache(shape, "int8", 25, 16) for _ in range(2))
    out, *_ = rope_write(ops, qkv, shape, ours, torch.arange(400), pairs=8)
    heads = out.view(400, -1, 16)
    twin.write(LAYER, torch.arange(400), heads[:, 2:4], heads[:, 4:])
    assert torch.equal(ours.pool, twin.pool)


# ---- attention


@dataclass
class Step:
    """Sequences with their keys in a cache, and the queries of a step: those of the last tokens of each."""

    shape: Shape
    cache: KVCache
    qkv: Tensor  # [T, (H + 2 G) D]
    lengths: list[int]
    first_rows: list[int]
    table: Tensor  # [S, B]

    @classmethod
    def of(cls, shape: Shape, codec: str, lengths: Sequence[int], queries: Sequence[int], block_size: int = 16) -> Step:
        width = -(-max(lengths) // block_size)
        cache = make_cache(shape, codec, len(lengths) * width + 1, block_size)
        blocks = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(1)) + 1
        table = blocks.view(len(lengths), width)
        for s, length in enumerate(lengths):
            position = torch.arange(length)
            slots = table[s, position // block_size] * block_size + position % block_size
            keys, values = (randn(length, shape.groups, shape.dim, seed=10 * s + n) for n in (0, 1))
            cache.write(LAYER, slots, keys * 2, values)
        for s, length in enumerate(lengths):  # unused entries point at a block of nobody
            table[s, -(-length // block_size) :] = 0
        rows = [0, *torch.tensor(queries).cumsum(0).tolist()]
        return cls(shape, cache, randn(rows[-1], shape.width, seed=5), list(lengths), rows, table)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Attention [T, H, D] in float64 over what the cache holds, and what int8 weights may add as error."""
        keys, values = self.cache.read(LAYER, self.table)
        parts = [self._sequence(s, keys[s], values[s]) for s in range(len(self.lengths))]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _sequence(self, s: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        shape, length = self.shape, self.lengths[s]
        queries = self.qkv[self.first_rows[s] : self.first_rows[s + 1]].view(
            -1, shape.heads + 2 * shape.groups, shape.dim
        )
        q = stored_query(queries[:, : shape.heads], self.cache.layout.codec).double()  # [Q, H, D]
        k, v = (x[:length].repeat_interleave(shape.heads // shape.groups, 1).double() for x in (keys, values))
        scores = torch.einsum("qhd,khd->qhk", q, k) * shape.scale
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (shape.window or length))
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("qhk,khd->qhd", weights, v)
        if self.cache.layout.codec != "int8":
            return out, torch.zeros_like(out)
        # A weight times its token's scale is rounded to 255 steps of the largest.
        steps = v.abs().amax(-1) / 127  # [K, H], the scale of each value vector
        largest = (weights * steps.T).amax(-1) / 510  # [Q, H]
        return out, largest[..., None] * torch.einsum(
            "qk,khd->qhd", seen.double(), v.abs() / steps[..., None].clamp_min(1e-9)
        )

    def run(self, ops: Ops, *, split: bool = False, tile: int = 4, heads: int = 1) -> Tensor:
        """[T, H, D] of the kernel: tiles of queries, some heads at a time, the pieces of the keys apart or merged at once."""
        shape, tokens = self.shape, self.first_rows[-1]
        pieces = -(-max(self.lengths) // _native.PIECE_KEYS)
        out = torch.full((pieces if split else 1, tokens, shape.heads, shape.dim), torch.nan)
        states = torch.full((pieces, tokens, shape.heads, 2), torch.nan)
        rows, lengths, table = integers(self.first_rows), integers(self.lengths), integers(self.table)
        tables = torch.tensor([address(blocks) for blocks in table])
        sequences = _native.Sequences(len(lengths), address(rows), address(lengths), address(tables))
        view, native, at = layer_cache(self.cache, LAYER), shape.native, address(states) if split else 0
        for item in self._items(pieces, tile, heads, split):
            ops.kernels.attend(address(self.qkv), native, sequences, view, item, address(out), at)
        if not split:
            return out[0]
        joined = torch.full_like(out[0], torch.nan)
        ops.kernels.merge(address(out), at, pieces, native, tokens, address(joined))
        return joined

    def _items(self, pieces: int, tile: int, heads: int, split: bool) -> Iterator[list[int]]:
        for s, length in enumerate(self.lengths):
            queries = self.first_rows[s + 1] - self.first_rows[s]
            own = -(-length // _native.PIECE_KEYS)
            spans = [(piece, piece + 1) for piece in range(pieces)] if split else [(0, own)]
            for first in range(0, queries, tile):
                for group in range(0, self.shape.groups, heads):
                    groups = (group, min(group + heads, self.shape.groups))
                    yield from ([s, *groups, first, min(first + tile, queries), *span] for span in spans)


def stored_query(q: Tensor, codec: str) -> Tensor:
    """Queries as they are multiplied: bfloat16, or 8 bits per head."""
    if codec == "bfloat16":
        return q.bfloat16().float()
    top = q.abs().amax(-1, keepdim=True)
    return (q * (127 / top)).round() * (top / 127)


def assert_attends(step: Step, out: Tensor) -> None:
    expected, slack = step.expected()
    error = (out.double() - expected).abs()
    assert (error <= slack * 1.01 + 2e-5).all(), float((error - slack).max())


CODECS = ["bfloat16", "int8"]
BOUNDARIES = [1, 15, 16, 17, 127, 128, 129, 300]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (3, 1), (8, 2), (9, 1), (13, 1)])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_decode_of_many_lengths(ops: Ops, codec: str, heads: int, groups: int, dim: int) -> None:
    step = Step.of(Shape(heads, groups, dim), codec, BOUNDARIES, [1] * len(BOUNDARIES))
    assert_attends(step, step.run(ops))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dim", [256, 512])
def test_wide_heads(ops: Ops, codec: str, dim: int) -> None:
    step = Step.of(Shape(14, 1, dim, scale=0.05), codec, [40, 129], [3, 1])
    assert_attends(step, step.run(ops))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 1, 8, 16, 130])
def test_chunks_windows_and_caps(ops: Ops, codec: str, window: int, softcap: float) -> None:
    step = Step.of(
        Shape(6, 2, 32, softcap=softcap, window=window),
        codec,
        [5, 40, 133, 260, 300],
        [5, 1, 13, 2, 300],
        block_size=48,
    )
    assert_attends(step, step.run(ops))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("window", [0, 150])
def test_pieces_of_the_keys_join_to_the_whole_bit_for_bit(ops: Ops, codec: str, window: int) -> None:  # E14
    """Some pieces see nothing: the short sequences have no keys there, and a window leaves the first ones out."""
    lengths = [1, 128, 255, 256, 257, 700, 1025]
    step = Step.of(Shape(9, 3, 64, window=window), codec, lengths, [1, 2, 1, 1, 3, 1, 5])
    whole = step.run(ops)
    assert_attends(step, whole)
    assert torch.equal(step.run(ops, split=True), whole)
    assert torch.equal(step.run(ops, split=True, tile=1), whole)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("window", [0, 7, 200])
def test_tiles_of_queries_and_heads_do_not_change_a_bit(ops: Ops, codec: str, window: int) -> None:  # E14, E15
    """Which queries and heads are attended together, and beside which sequences, is not visible in the result."""
    shape = Shape(6, 2, 32, window=window)
    step = Step.of(shape, codec, [33, 450], [20, 37])
    whole = step.run(ops, tile=2)
    for tile in (1, 3, 4, 7):
        assert torch.equal(step.run(ops, tile=tile), whole)
        assert torch.equal(step.run(ops, tile=tile, heads=2), whole)
    alone = Step(shape, step.cache, step.qkv[20:].contiguous(), [450], [0, 37], step.table[1:])
    assert torch.equal(alone.run(ops, tile=4), whole[20:])
    last = Step(shape, step.cache, step.qkv[-1:].contiguous(), [450], [0, 1], step.table[1:])
    assert torch.equal(last.run(ops), whole[-1:])


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_former_owner_left_is_not_seen(ops: Ops, codec: str) -> None:  # A22
    """Keys and values behind the end of a sequence, even ones that are not numbers, change no bit."""
    step = Step.of(Shape(4, 2, 16), codec, [1, 21, 130], [1, 3, 2])
    expected = step.run(ops)
    bad = torch.full((1, 2, 16), torch.nan if codec == "bfloat16" else 3e4)
    for s, length in enumerate(step.lengths):
        last = int(step.table[s, (length - 1) // 16])
        for offset in range((length - 1) % 16 + 1, 16):
            step.cache.write(LAYER, torch.tensor([last * 16 + offset]), bad, bad)
    assert torch.equal(step.run(ops), expected)


def test_sharp_scores_pick_their_key(ops: Ops) -> None:
    """Scores of hundreds neither overflow nor blur: the value of the one best key comes out."""
    shape = Shape(1, 1, 16, scale=1.0)
    for codec in CODECS:
        step = Step.of(shape, codec, [200], [1])
        keys, values = step.cache.read(LAYER, step.table)
        for best in (0, 77, 128, 199):
            step.qkv[0, :16] = keys[0, best, 0] * 60
            scores = step.qkv[0, :16] @ keys[0, :200, 0].T
            expected = values[0, int(scores.argmax()), 0]
            torch.testing.assert_close(step.run(ops)[0, 0], expected, atol=0.02 * float(expected.abs().max()), rtol=0)


def test_the_codec_in_python_bounds_the_twin() -> None:
    """The slack above is for rounded weights only: rounded queries are part of the twin."""
    q = randn(3, 2, 16)
    top = q.abs().amax(-1, keepdim=True)
    assert ((stored_query(q, "int8") - q).abs() <= top / 254 * (1 + 1e-5)).all()
    assert torch.equal(Int8Codec().decode(Int8Codec().encode(q * 0), torch.float32), q * 0)
