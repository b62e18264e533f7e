"""What `pca-lut` has beyond the contract of all wire codecs: exact tokens, tables, packing, look-up tables, allocation of bits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_tables import correlated, rope_of, table_for

from triblade.errors import CheckpointError, ConfigError, WireError
from triblade.kv.cache import KVCache
from triblade.kv.calibration_bits import allocate
from triblade.kv.calibration_fit import FitOptions, fit_table, refit_table
from triblade.kv.calibration_lloyd import BIN_WIDTH, bin_centers, codes_of_bins, histograms, lloyd_max, normal_shares
from triblade.kv.calibration_statistics import KVStatistics, Reservoir
from triblade.kv.layout import KVLayout
from triblade.kv.wire import WireSpan
from triblade.kv.wire_components import Components
from triblade.kv.wire_packing import Packing
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_table import KVTable, TableModel

LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, codec="float32", model_hash="m", rope=rope_of(2, 8)
)
BLOCKS = [3, 0, 2, 4, 1]
CPU = torch.device("cpu")


def filled(layout: KVLayout = LAYOUT, tokens: int = 20) -> KVCache:
    cache = KVCache(layout, 5, torch.float32)
    x = correlated(2, 16, tokens, seed=3).unflatten(3, (2, 8))
    slots = torch.tensor([BLOCKS[t // 4] * 4 + t % 4 for t in range(tokens)])
    for layer in range(2):
        cache.write(layer, slots, x[layer, 0], x[layer, 1])
    return cache


def differing(one: KVCache, other: KVCache, tokens: int = 20) -> list[int]:
    """Tokens of which anything differs."""
    table = torch.tensor([BLOCKS])
    pairs = [torch.cat(one.read(i, table)) - torch.cat(other.read(i, table)) for i in range(2)]
    return torch.stack(pairs).abs().amax((0, 1, 3, 4))[:tokens].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("first", "last", "coded"), [(4, 6, range(4, 14)), (0, 0, range(20)), (3, 40, ()), (30, 0, ())]
)
def test_the_first_and_the_last_tokens_are_exact(first: int, last: int, coded: range) -> None:
    codec = PcaLutWire(LAYOUT, table_for(LAYOUT, 4.0, first, last))
    source, target = filled(), KVCache(LAYOUT, 5, torch.float32)
    codec.decode(target, BLOCKS, WireSpan(0, 20, 20), codec.encode(source, BLOCKS, WireSpan(0, 20, 20)))
    assert differing(source, target) == list(coded)


def test_exact_is_counted_in_the_whole_prompt() -> None:
    codec = PcaLutWire(LAYOUT, table_for(LAYOUT, 4.0, 4, 6))
    source, target = filled(), KVCache(LAYOUT, 5, torch.float32)
    span = WireSpan(40, 20, 64)  # tokens 58 .. 63 are the last
    codec.decode(target, BLOCKS, span, codec.encode(source, BLOCKS, span))
    assert differing(source, target) == list(range(18))


def test_exact_tokens_need_no_more_than_the_receiver_keeps() -> None:
    table = table_for(LAYOUT, 4.0, 0, 40)
    source, local = filled(), KVCache(replace(LAYOUT, codec="int8"), 5, torch.float32)
    span = WireSpan(0, 20, 20)
    plain, small = PcaLutWire(LAYOUT, table), PcaLutWire(LAYOUT, table, receiver_dtype="int8")
    payloads = [codec.encode(source, BLOCKS, span) for codec in (plain, small)]
    assert len(payloads[1]) < 0.4 * len(payloads[0])
    received = [KVCache(local.layout, 5, torch.float32) for _ in payloads]
    for cache, payload in zip(received, payloads, strict=True):
        PcaLutWire(local.layout, table).decode(cache, BLOCKS, span, payload)
    assert torch.equal(received[0].pool, received[1].pool)


def test_the_size_is_that_of_the_bits() -> None:
    table = table_for(LAYOUT, 3.0, 0, 0)
    size = len(PcaLutWire(LAYOUT, table).encode(filled(), BLOCKS[:4], WireSpan(0, 16, 99)))
    assert table.bits_per_token == 3 * 2 * 2 * 16
    assert size < table.bits_per_token * 16 / 8 + 100


def test_wrong_positions_would_be_noticed() -> None:
    """Keys are turned back by where the tokens stand; the twin that forgets it is far off."""
    table = table_for(LAYOUT, 6.0, 0, 0)
    codec = PcaLutWire(LAYOUT, table)
    x = correlated(2, 16, 16, seed=5)
    keys = x[:, 0].unflatten(2, (2, 8)).clone()
    codec._rotation.apply(keys, torch.arange(100, 116))
    source = KVCache(LAYOUT, 5, torch.float32)
    for layer in range(2):
        source.write(layer, torch.arange(16), keys[layer], x[layer, 1].unflatten(1, (2, 8)))

    def error(first_token: int) -> float:
        target, span = KVCache(LAYOUT, 5, torch.float32), WireSpan(first_token, 16, 500)
        codec.decode(target, range(4), span, codec.encode(source, range(4), span))
        back = target.read(0, torch.arange(4)[None])[0][0]
        return float((back - keys[0]).square().sum() / keys[0].square().sum())

    assert error(100) < 0.002
    assert error(0) > 10 * error(100)


def test_a_table_is_needed_and_must_be_of_the_model() -> None:
    with pytest.raises(ConfigError, match="needs a table"):
        PcaLutWire(LAYOUT)
    with pytest.raises(ConfigError, match="model_hash is m, the model's is other"):
        PcaLutWire(replace(LAYOUT, model_hash="other"), table_for(LAYOUT))
    with pytest.raises(ConfigError, match="num_kv_heads is 2, the model's is 1"):
        PcaLutWire(replace(LAYOUT, num_kv_heads=1, head_dim=16), table_for(LAYOUT))


def test_payloads_of_a_table_before_are_still_read() -> None:
    old, new, newer = (table_for(LAYOUT, bits) for bits in (3.0, 4.0, 5.0))
    span, source = WireSpan(0, 20, 20), filled()
    payload = PcaLutWire(LAYOUT, old).encode(source, BLOCKS, span)
    receiver = PcaLutWire(LAYOUT, old)
    receiver.use(new)
    assert receiver.table is new
    receiver.decode(KVCache(LAYOUT, 5, torch.float32), BLOCKS, span, payload)
    receiver.use(newer)
    with pytest.raises(WireError, match=f"made with the table {old.fingerprint().hex()}"):
        receiver.decode(KVCache(LAYOUT, 5, torch.float32), BLOCKS, span, payload)


def test_a_table_file_says_the_same_again(tmp_path: Path) -> None:
    table = replace(table_for(LAYOUT, 3.0), figures={"kl": 0.25})
    table.save(tmp_path / "sub" / "table.safetensors")
    again = KVTable.load(tmp_path / "sub" / "table.safetensors")
    assert again.fingerprint() == table.fingerprint()
    assert again.figures == {"kl": 0.25}
    assert (again.exact_first, again.exact_last) == (table.exact_first, table.exact_last)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["table.safetensors"]
    span, source = WireSpan(0, 20, 20), filled()
    assert PcaLutWire(LAYOUT, again).encode(source, BLOCKS, span) == PcaLutWire(LAYOUT, table).encode(
        source, BLOCKS, span
    )


def test_damaged_table_files_say_so(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    with pytest.raises(ConfigError, match="no such KV table"):
        KVTable.load(path)
    content = table_for(LAYOUT).to_bytes()
    for damaged in (content[:7], content[:200], content[:-5], b"", content.replace(b"kv-table-1", b"kv-table-9")):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot read the KV table"):
            KVTable.load(path)
    wrong = [
        {"bits": table_for(LAYOUT).bits[:1]},
        {"mean": torch.full_like(table_for(LAYOUT).mean, math.nan)},
        {"bits": torch.full_like(table_for(LAYOUT).bits, 9)},
        {"levels": table_for(LAYOUT).levels[1:]},
    ]
    for change in wrong:
        path.write_bytes(replace(table_for(LAYOUT), **change).to_bytes())  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=next(iter(change))[:4]):
            KVTable.load(path)


@given(bits=st.lists(st.integers(1, 8), min_size=1, max_size=20), tokens=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_packing_loses_nothing_and_wastes_nothing(bits: list[int], tokens: int, seed: int) -> None:
    rows = np.array(bits, dtype=np.uint8)
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, 2**b, tokens) for b in bits]).astype(np.uint8)
    packing = Packing.of(rows)
    data = b"".join(packing.pack(codes))
    assert len(data) == packing.size(tokens) == sum(bits) * -(-tokens // 8)
    assert np.array_equal(packing.unpack(memoryview(data), tokens), codes)


def test_levels_are_those_known_for_the_normal_distribution() -> None:
    """Max (1960), table 1: mean squared errors of 2, 4, 8 and 16 levels, and the levels of 4."""
    shares = normal_shares(1.0)[None]
    for bits, expected in ((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)):
        levels, error = lloyd_max(shares, bits)
        assert error.item() == pytest.approx(expected, rel=0.02)
    levels, _ = lloyd_max(shares, 2)
    assert levels[0].tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=0.02)


def test_every_bin_has_the_code_of_its_nearest_level() -> None:
    levels = torch.tensor([[-2.0, 0.1, 0.3, 5.0]])
    nearest = (bin_centers()[:, None] - levels).abs().argmin(1)
    codes = codes_of_bins(levels)[0].long()
    borders = ((levels[0, 1:] + levels[0, :-1]) / 2)[None]
    inside = ((bin_centers()[:, None] - borders).abs() > BIN_WIDTH).all(1)
    assert torch.equal(codes[inside], nearest[inside])


def test_numbers_far_out_fall_into_the_outermost_bins() -> None:
    shares = histograms(torch.tensor([[-1e9], [1e9], [0.0], [0.0]]).repeat(10_000, 1))
    assert shares[0, [0, -1]].tolist() == pytest.approx([0.25, 0.25], rel=0.01)
    assert shares.sum().item() == pytest.approx(1)


def exact_optimum(errors: np.ndarray, budget: int) -> float:  # type: ignore[type-arg]
    """The obvious twin: every combination."""
    choices = product(range(errors.shape[1]), repeat=len(errors))
    return min(sum(errors[i, b] for i, b in enumerate(bits)) for bits in choices if sum(bits) <= budget)


@given(seed=st.integers(0, 500), budget=st.integers(0, 16))
@settings(max_examples=60, deadline=None)
def test_bits_are_spent_as_dynamic_programming_would(seed: int, budget: int) -> None:
    random = np.random.default_rng(seed)
    variance, shrink = random.exponential(1, 4), random.uniform(0.15, 0.6, 4)
    errors = variance[:, None] * shrink[:, None] ** np.arange(5)  # each bit gains less than the one before
    bits = allocate(errors, budget)
    assert bits.sum() == min(budget, 16)
    assert errors[range(4), bits].sum() == pytest.approx(exact_optimum(errors, budget))


def test_bits_that_gain_only_together_are_bought_together() -> None:
    errors = np.array([[10.0, 9.5, 1.0, 0.5], [4.0, 2.5, 1.9, 1.8]])
    for budget, best in ((2, [2, 0]), (3, [2, 1]), (4, [2, 2]), (6, [3, 3])):
        assert allocate(errors, budget).tolist() == best
        assert errors[range(2), best].sum() == exact_optimum(errors, budget)


def test_the_metric_decides_where_errors_go() -> None:
    statistics, indifferent = (KVStatistics(1, 8, 500) for _ in range(2))
    x = torch.randn(1, 2, 3000, 8, generator=torch.Generator().manual_seed(0))
    gradients = torch.randn(1, 2, 3000, 8, generator=torch.Generator().manual_seed(1))
    gradients[..., 0] *= 30  # the model minds errors of the first number most
    for each in (statistics, indifferent):
        each.add(x)
    statistics.add_gradients(gradients)
    model = TableModel(model_hash="m", num_layers=1, num_kv_heads=1, head_dim=8)

    def error(found: KVStatistics) -> torch.Tensor:
        components = Components(fit_table(model, found.moments(), FitOptions(bits=2.0)), CPU)
        return (components.decode(components.encode(x)) - x).square().mean((0, 1, 2))

    assert error(statistics)[0] < 0.2 * error(indifferent)[0]
    assert error(statistics)[1:].mean() > error(indifferent)[1:].mean()


def test_the_expected_change_of_predictions_is_that_of_the_metric() -> None:
    statistics = KVStatistics(1, 8, 500)
    x = torch.randn(1, 2, 500, 8, generator=torch.Generator().manual_seed(0))
    statistics.add(x)
    statistics.add_gradients(3 * torch.eye(8).expand(1, 2, 8, 8))  # metric 9 / 8 in every direction
    model = TableModel(model_hash="m", num_layers=1, num_kv_heads=1, head_dim=8)
    components = Components(fit_table(model, statistics.moments(), FitOptions(bits=2.0)), CPU)
    squared = (components.decode(components.encode(x)) - x).square().sum((0, 1, 3)).mean()
    assert components.errors(x).nats == pytest.approx(squared.item() * 9 / 8 / 2, rel=1e-3)


def test_variance_limits_the_components() -> None:
    statistics = KVStatistics(2, 16, 2000)
    statistics.add(correlated(2, 16, 4000))
    limited = fit_table(
        TableModel.of(LAYOUT), statistics.moments(), FitOptions(bits=8.0, variance=0.95, use_metric=False)
    )
    variance = limited.spread.double() ** 2
    kept = limited.bits > 0
    share = (variance * kept).sum(-1) / variance.sum(-1)
    assert (share >= 0.95).all()
    assert (share - variance[..., 0] / variance.sum(-1) < 0.95).all()
    assert set(limited.bits[kept].tolist()) == {8}


def test_a_refit_follows_the_traffic() -> None:
    table = table_for(LAYOUT, 3.0)
    later = correlated(2, 16, 3000, seed=9, spread=2.0) + 1.0
    statistics = KVStatistics(2, 16, 2000)
    statistics.add(later[:, :, :2000])
    again = refit_table(table, statistics.moments())
    before, after = (Components(each, CPU).errors(later[:, :, 2000:]).nats for each in (table, again))
    assert after < 0.7 * before
    assert again.bits_per_token == table.bits_per_token
    assert (again.exact_first, again.exact_last) == (table.exact_first, table.exact_last)


def test_moments_do_not_depend_on_how_tokens_come() -> None:
    x = correlated(2, 6, 90)
    whole, pieces = KVStatistics(2, 6, 1000), KVStatistics(2, 6, 1000)
    whole.add(x)
    for piece in x.split(7, dim=2):
        pieces.add(piece)
    one, other = whole.moments(), pieces.moments()
    assert torch.allclose(one.covariance, other.covariance, atol=1e-5)
    centred = x - x.mean(2, keepdim=True)
    assert torch.allclose(one.covariance.float(), centred.transpose(2, 3) @ centred / 90, atol=1e-4)
    assert torch.equal(one.sample, other.sample)


def test_a_reservoir_holds_each_token_equally_often() -> None:
    counts = torch.zeros(40)
    for seed in range(400):
        reservoir = Reservoir(1, 1, 10, seed)
        for piece in torch.arange(40.0).view(1, 1, 40, 1).repeat(1, 2, 1, 1).split(9, dim=2):
            reservoir.add(piece)
        kept = reservoir.tokens()[0, 0, :, 0].long()
        assert len(set(kept.tolist())) == len(reservoir) == 10
        counts[kept] += 1
    assert (counts - 100).abs().max() < 40  # 4.6 standard deviations
