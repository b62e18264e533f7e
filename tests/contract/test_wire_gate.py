"""The gate before a lossy codec: limit and fallback per request, drift, and a new table without a restart (rows P2, P5)."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor
from wire_tables import correlated, rope_of, table_for

from triblade.errors import ConfigError, NumericalError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.layout import KVLayout
from triblade.kv.wire import Int8Wire, RawWire, WireSpan, codec_of
from triblade.kv.wire_components import Components
from triblade.kv.wire_gate import AnyWire, GateLimits, WireGate
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_rotation import Rotation
from triblade.kv.wire_table import KVTable

ROPE = rope_of(2, 8)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8, codec="float32", model_hash="m", rope=ROPE)
SPAN = WireSpan(0, 64, 200)


def measured(table: KVTable) -> KVTable:
    """With its errors on text that it was not made from."""
    errors = Components(table, torch.device("cpu")).errors(correlated(2, 16, 500, seed=1))
    return replace(table, figures=asdict(errors))


def gate(**limits: float) -> WireGate:
    table = measured(table_for(LAYOUT, 4.0))
    return WireGate(PcaLutWire(LAYOUT, table), RawWire(LAYOUT), GateLimits(**{"refresh_tokens": 512, **limits}))  # type: ignore[arg-type]


def traffic(seed: int, spread: float = 1.0, shift: float = 0.0) -> tuple[KVCache, Tensor]:
    """A cache of one request of 64 tokens, and its keys and values."""
    x = correlated(2, 16, 64, seed=seed, spread=spread) + shift
    cache = KVCache(LAYOUT, 8, torch.float32)
    keys, values = x.unflatten(3, (2, 8)).unbind(1)
    turned = keys.clone()
    Rotation(ROPE).apply(turned, torch.arange(64))
    for layer in range(2):
        cache.write(layer, torch.arange(64), turned[layer], values[layer])
    return cache, x


def test_traffic_like_the_tables_goes_through() -> None:
    subject = gate()
    for seed in range(10, 20):
        request = subject.request()
        assert codec_of(request.encode(traffic(seed)[0], range(8), SPAN)) == "pca-lut"
    assert subject.counts.payloads == 10
    assert subject.counts.fallback_requests == 0
    assert 0.7 < subject.recent_error < 1.4
    assert not subject.has_drifted


def test_over_the_limit_a_request_is_sent_raw_and_counted() -> None:
    subject = gate()
    receiver = AnyWire({"pca-lut": subject.codec, "raw": subject.fallback})
    strange, usual = traffic(30, spread=8.0)[0], traffic(31)[0]
    request = subject.request()
    payload = request.encode(strange, range(8), SPAN)
    assert codec_of(payload) == request.name == "raw"
    arrived = KVCache(LAYOUT, 8, torch.float32)
    receiver.decode(arrived, range(8), SPAN, payload)
    assert torch.equal(arrived.pool, strange.pool)
    assert codec_of(request.encode(usual, range(8), SPAN)) == "raw"  # the rest of this request as well
    assert codec_of(subject.request().encode(usual, range(8), SPAN)) == "pca-lut"  # and of no other
    assert (subject.counts.payloads, subject.counts.fallback_payloads, subject.counts.fallback_requests) == (3, 2, 1)
    assert subject.counts.last_error is not None


def test_a_request_knows_the_errors_of_what_it_encoded() -> None:
    subject = gate(sample_tokens=64)
    request, seen = subject.request(), []
    assert request.errors == ()
    for seed in (10, 11):
        request.encode(traffic(seed)[0], range(8), SPAN)
        assert subject.counts.last_error is not None
        seen.append(subject.counts.last_error)
    keys, values = request.errors
    assert keys == pytest.approx((seen[0].keys + seen[1].keys) / 2)
    assert values == pytest.approx((seen[0].values + seen[1].values) / 2)
    request.encode(traffic(30, spread=8.0)[0], range(8), SPAN)  # goes raw: no error of its own
    assert request.errors == (keys, values)


def test_numbers_that_are_none_are_harm() -> None:
    cache, _ = traffic(40)
    cache.write(1, torch.arange(64), torch.full((64, 2, 8), torch.nan), torch.zeros(64, 2, 8))
    subject = gate()
    assert codec_of(subject.request().encode(cache, range(8), SPAN)) == "raw"
    assert subject.counts.fallback_requests == 1
    with pytest.raises(NumericalError, match="not finite"):
        subject.codec.encode(cache, range(8), SPAN)


def test_a_prompt_of_exact_tokens_only_has_nothing_to_watch() -> None:
    subject = gate()
    cache, _ = traffic(41, spread=50.0)
    assert codec_of(subject.request().encode(cache, range(1), WireSpan(0, 3, 3))) == "pca-lut"
    assert subject.counts.last_error is None


def test_samples_are_as_far_apart_as_told() -> None:
    subject = gate(sample_tokens=128, request=1e9)
    request, seen = subject.request(), []
    for start in range(0, 512, 64):
        subject.counts.last_error = None
        request.encode(traffic(50)[0], range(8), WireSpan(start, 64, 1000))
        seen.append(subject.counts.last_error is not None)
    assert seen == [True, False, True, False, True, False, True, False]


def test_drift_is_noticed_and_a_new_table_ends_it() -> None:
    """Row P5: the error of drifted traffic, then of the same traffic with the refreshed table."""
    subject = gate(request=100.0, sample_tokens=1)

    def send(seeds: range) -> float:
        for seed in seeds:
            subject.request().encode(traffic(seed, spread=2.0, shift=1.0)[0], range(8), SPAN)
        return subject.recent_error

    drifted = send(range(100, 180))
    assert drifted > 2
    assert subject.has_drifted
    table = subject.refreshed()
    assert subject.codec.table is not table  # nothing has changed before the receivers have it
    subject.use(KVTable.from_bytes(table.to_bytes()))
    assert not subject.has_drifted
    refreshed = send(range(200, 280))
    assert 0.7 < refreshed < 1.4
    absolute = refreshed * table.figures["nats"]
    assert absolute < 0.7 * drifted * measured(table_for(LAYOUT, 4.0)).figures["nats"]
    assert subject.counts.refreshes == 1
    assert not subject.has_drifted


def test_drift_is_told_again_only_of_new_samples() -> None:
    """Where no table could be made of the old ones."""
    subject = gate(request=100.0, sample_tokens=1)
    for seed in range(100, 180):
        subject.request().encode(traffic(seed, spread=2.0, shift=1.0)[0], range(8), SPAN)
    assert subject.has_drifted
    subject.forget_samples()
    assert not subject.has_drifted
    subject.request().encode(traffic(180, spread=2.0, shift=1.0)[0], range(8), SPAN)
    assert subject.recent_error > 1.5


def test_a_few_samples_are_no_drift() -> None:
    subject = gate(request=100.0)
    for seed in range(10):
        subject.request().encode(traffic(seed, spread=3.0)[0], range(8), SPAN)
    assert subject.recent_error > 2
    assert not subject.has_drifted


def test_a_table_that_does_not_know_its_errors_cannot_be_watched() -> None:
    with pytest.raises(ConfigError, match="does not say how large its errors are"):
        WireGate(PcaLutWire(LAYOUT, table_for(LAYOUT)), Int8Wire(LAYOUT))
    with pytest.raises(ConfigError, match="1 < drift <= request"):
        GateLimits(drift=5.0)


def test_payloads_of_a_codec_that_a_receiver_does_not_have_are_refused() -> None:
    payload = RawWire(LAYOUT).encode(traffic(0)[0], range(8), SPAN)
    with pytest.raises(WireError, match="the codec 'raw', expected one of: int8"):
        AnyWire({"int8": Int8Wire(LAYOUT)}).decode(KVCache(LAYOUT, 8, torch.float32), range(8), SPAN, payload)
