"""What int8 on the wire loses: measured on sampled rows of every request, and what becomes of one that would lose too much."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from disaggregated import pair
from tiny import prompt
from tiny_engine import open_tiny, tiny_llm
from torch import Tensor
from wire_tables import correlated

from triblade.config import TransferConfig
from triblade.disagg.codecs import Sender
from triblade.errors import ConfigError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.kv.wire import Int8Wire, RawWire, WireSpan, codec_of
from triblade.kv.wire_int8_gate import SAMPLE_TOKENS, Int8Gate
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, codec="float32", model_hash="m")
SPAN = WireSpan(0, 60, 200)
LIMIT = 1.2e-3
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IDS = prompt(57, seed=21)


def gate(limit: float = LIMIT, *, raw: bool = True) -> Int8Gate:
    return Int8Gate(Int8Wire(LAYOUT), RawWire(LAYOUT) if raw else None, limit)


def holding(x: Tensor) -> KVCache:
    """A cache of 64 tokens [L, 2, 64, 16]."""
    cache = KVCache(LAYOUT, 8, torch.float32)
    keys, values = x.unflatten(3, (2, 8)).unbind(1)
    for layer in range(2):
        cache.write(layer, torch.arange(64), keys[layer], values[layer])
    return cache


def usual(seed: int = 1) -> Tensor:
    return correlated(2, 16, 64, seed=seed)


def test_the_error_is_that_of_what_arrives() -> None:
    x = usual()
    request = gate().request()
    payload = request.encode(holding(x), range(8), SPAN)
    arrived = KVCache(LAYOUT, 8, torch.float32)
    Int8Wire(LAYOUT).decode(arrived, range(8), SPAN, payload)
    sample = x[:, :, 32:40]  # the block in the middle
    came = torch.stack([torch.stack(arrived.read(layer, torch.tensor([[4]]))) for layer in range(2)])[:, :, 0].flatten(
        3
    )
    lost = (came - sample).square().sum((0, 2, 3)) / sample.square().sum((0, 2, 3))
    assert request.errors == pytest.approx(tuple(lost.tolist()), rel=1e-3)
    assert all(0 < error < 8 / (12 * 127**2) for error in request.errors)


def test_samples_of_long_requests_are_averaged() -> None:
    subject = gate()
    request, seen = subject.request(), []
    for start in range(0, 2 * SAMPLE_TOKENS, 64):
        subject.counts.last_error = None
        request.encode(holding(usual(seed=start)), range(8), WireSpan(start, 64, 1000))
        if (error := subject.counts.last_error) is not None:
            seen.append(error)
    assert len(seen) == 2
    assert request.errors[0] == pytest.approx((seen[0].keys + seen[1].keys) / 2)


def broken(kind: str) -> Tensor:
    """In one layer only."""
    x = usual()
    if kind == "no number":
        x[1, 0, 33, 3] = torch.nan
    elif kind == "infinite":
        x[0, 1, 39, 0] = torch.inf
    else:  # below half a step of the smallest scale
        x[1, 1] *= 1e-9
    return x


@pytest.mark.parametrize("kind", ["no number", "infinite", "too small"])
def test_numbers_that_int8_cannot_hold_go_raw(kind: str) -> None:
    subject, cache = gate(), holding(broken(kind))
    request = subject.request()
    payload = request.encode(cache, range(8), SPAN)
    assert codec_of(payload) == "raw"
    arrived = KVCache(LAYOUT, 8, torch.float32)
    RawWire(LAYOUT).decode(arrived, range(8), SPAN, payload)
    assert torch.equal(arrived.pool, cache.pool)
    assert codec_of(request.encode(holding(usual()), range(8), SPAN)) == "raw"  # the rest of this request as well
    assert codec_of(subject.request().encode(holding(usual()), range(8), SPAN)) == "int8"  # and of no other
    assert (subject.counts.fallback_requests, request.errors) == (1, ())


def test_without_another_codec_nothing_is_sent() -> None:
    subject = gate(raw=False)
    request = subject.request()
    for _ in range(2):
        with pytest.raises(WireError, match="the codec int8 would change the rows too much"):
            request.encode(holding(broken("too small")), range(8), SPAN)
    assert codec_of(subject.request().encode(holding(usual()), range(8), SPAN)) == "int8"
    assert subject.counts.fallback_requests == 1


def test_a_receiver_that_stores_int8_gets_what_it_would_store() -> None:
    strict = TransferConfig(wire_codec="int8", wire_error_limit=1e-9)
    cache = holding(usual())
    codecs = {}
    for name in ("float32", "int8"):
        request = Sender(strict, LAYOUT, replace(LAYOUT, codec=name)).request()
        codecs[name] = codec_of(request.encode(cache, range(8), SPAN))
        assert (request.errors == ()) == (name == "float32")
    assert codecs == {"float32": "raw", "int8": "int8"}


def test_rows_that_are_int8_already_lose_nothing_and_are_not_sampled() -> None:
    layout = replace(LAYOUT, codec="int8")
    cache = KVCache(layout, 8, torch.float32)
    request = Sender(TransferConfig(wire_codec="int8"), layout, layout).request()
    assert codec_of(request.encode(cache, range(8), SPAN)) == "int8"
    assert request.errors == ()


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_limits_that_are_none(limit: float) -> None:
    with pytest.raises(ConfigError, match="wire_error_limit must be a finite number above 0"):
        TransferConfig(wire_error_limit=limit)


@cache
def model() -> OpenModel:
    return open_tiny("llama")


TO_INT8: dict[str, Any] = {"kv_cache_dtype": "int8", "prefill": {"kv_cache_dtype": "float32"}}
WAYS: dict[str, tuple[dict[str, Any], float, tuple[int, int, int]]] = {  # -> complete, failed, fallbacks
    "below the limit": ({}, 1e-3, (1, 0, 0)),
    "over it": ({}, 1e-9, (1, 0, 1)),
    "over it, into int8": (TO_INT8, 1e-9, (1, 0, 0)),
    "over it, and not raw": ({"prefill": {"kv_cache_dtype": "bfloat16"}}, 1e-9, (0, 1, 1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_between_workers(way: str) -> None:
    options, limit, expected = WAYS[way]
    transfer = {"wire_codec": "int8", "wire_error_limit": limit}
    with pair(model(), "tcp", transfer=transfer, **options) as workers:
        found = workers.generate([IDS], GREEDY)[0][0].token_ids
        counts = workers.remote.counts
        workers.eventually(lambda: [state.num_fallbacks for state in workers.fetcher.states] == [expected[2]])
        assert (counts.num_complete, counts.num_failed) == expected[:2]
        is_lossy = counts.num_complete == 1 and expected[2] == 0
        assert (counts.key_error.total > 0, counts.value_error.total > 0) == (is_lossy, is_lossy)
        assert counts.num_faults + sum(state.num_faults for state in workers.fetcher.states) == 0
    if not is_lossy:
        assert found == tiny_llm(model()).generate([IDS], GREEDY)[0][0].token_ids
