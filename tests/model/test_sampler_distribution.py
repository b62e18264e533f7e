"""The distribution a row is drawn from, the draws, and their independence of everything else."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy import COMBINATIONS, TOY, reference_distribution

from triblade.sampling_params import SamplingParams
from triblade.spec.distribution import WEIGHT_OF_BEST, draw
from triblade.spec.sampler import Sampler, SamplerRow, child_seed, uniform


def row(seed: int = 0, position: int = 0, **params: Any) -> SamplerRow:
    return SamplerRow(SamplingParams(**params), seed, position, [], [], frozenset())


def distribution(logits: Tensor, params: SamplingParams, rows: int = 1) -> Tensor:
    sampler = Sampler(logits.shape[-1])
    all_rows = [SamplerRow(params, 0, 0, [], [], frozenset())] * rows
    return sampler.probabilities(sampler.process(logits, all_rows), all_rows)


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_probabilities_equal_a_reference(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    found = distribution(torch.tensor([TOY]), params)[0].tolist()
    assert found == pytest.approx(reference_distribution(TOY, params), abs=1e-6)


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(st.integers(-60, 60), min_size=1, max_size=20, unique=True),
    temperature=st.floats(0.2, 5.0),
    top_k=st.integers(-1, 25),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_probabilities_equal_a_reference_for_any_options(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    values = [x / 7 for x in logits]
    at_edge = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=min(1.0, top_p * (1 + 1e-5)), min_p=min_p * (1 - 1e-5)
    )
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p * (1 - 1e-5), min_p=min(1.0, min_p * (1 + 1e-5))
    )
    expected = reference_distribution(values, params)
    assume(expected == reference_distribution(values, at_edge))  # no threshold within rounding of a token
    assert distribution(torch.tensor([values]), params)[0].tolist() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("size", [300, 6000])
def test_large_vocabularies_need_no_more_than_the_best_candidates(size: int) -> None:
    """Flat and peaked rows side by side: thresholds beyond the first candidates are found as well."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randperm(size, generator=generator).float().repeat(6, 1) / size
    logits[3:] *= 40
    options: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": size - 20}, {"top_k": 5000, "top_p": 0.7}]
    rows = [row(**option) for option in options * 2]
    found = Sampler(size).probabilities(logits, rows)
    for line, values, sampled in zip(found, logits, rows, strict=True):
        ordered, order = values.double().exp().sort(descending=True)
        top_k = sampled.params.top_k if sampled.params.top_k > 0 else size
        ordered[top_k:] = 0
        kept = ordered.cumsum(-1) - ordered < sampled.params.top_p * ordered.sum()
        expected = torch.zeros(size, dtype=torch.float64).scatter(0, order, ordered * kept)
        assert torch.allclose(line.double(), expected / expected.sum(), atol=1e-7)


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 3.0, 0.0]])
    assert distribution(logits, SamplingParams(top_k=1))[0].tolist() == [0, 0.5, 0, 0, 0.5, 0]
    assert (distribution(logits, SamplingParams(top_k=3))[0] > 0).tolist() == [True, True, True, True, True, False]
    assert (distribution(logits, SamplingParams(top_p=0.3))[0] > 0).tolist() == [False, True, False, False, True, False]


def test_greedy_rows_are_certain() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, 1.0, 0.5]])
    rows = [row(temperature=0.0), row(temperature=1e-4)]
    assert Sampler(3).probabilities(logits, rows).tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws, and total variation; F03 asks that `probabilities` is what is drawn from."""
    number = 20_000
    params = SamplingParams(**options)
    rows = [SamplerRow(params, child_seed(7, n % 100), n // 100, [], [], frozenset()) for n in range(number)]
    drawn = Counter(Sampler(len(TOY)).sample(torch.tensor([TOY]).expand(number, -1), rows).token_ids)
    expected = distribution(torch.tensor([TOY]), params)[0].tolist()
    assert {token for token, p in enumerate(expected) if p == 0}.isdisjoint(drawn)
    possible = [(drawn[token], number * p) for token, p in enumerate(expected) if p > 0]
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in possible)
    freedom = len(possible) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)
    assert sum(abs(seen - wanted) for seen, wanted in possible) / (2 * number) < 0.015


def test_draw_inverts_the_cumulative_distribution_exactly() -> None:
    unit = WEIGHT_OF_BEST / 4
    weights = torch.tensor([[0, unit, 0, 2 * unit, unit, 0]]).expand(6, -1)
    uniforms = torch.tensor([0.0, 0.249999, 0.25, 0.749999, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_draw_equals_a_running_sum_over_the_whole_vocabulary(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(200, size, generator=generator).mul(WEIGHT_OF_BEST).trunc()
    weights[torch.rand(200, size, generator=generator) < 0.7] = 0.0
    weights[:, size // 2] = 1.0
    uniforms = torch.rand(200, generator=generator, dtype=torch.float64)
    for line, number, token in zip(
        weights.long().tolist(), uniforms.tolist(), draw(weights, uniforms).tolist(), strict=True
    ):
        target = int(number * sum(line))
        assert sum(line[:token]) <= target < sum(line[: token + 1])


def test_a_row_is_the_same_bits_in_any_company() -> None:
    """Temperatures, filters, penalties and log-probabilities of the neighbours, their number and their order."""
    size, number = 40_000, 11  # above the size from which libraries split a reduction over threads
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(number, size, generator=generator) * 4
    varied = [*COMBINATIONS[:-1], {"temperature": 0.0}]
    rows = [row(seed=n, position=n, logprobs=n % 3, **options) for n, options in enumerate(varied)]
    sampler = Sampler(size)
    together, probabilities = sampler.sample(logits, rows), sampler.probabilities(logits, rows)
    for chosen in ([0], [3], [10], [8, 2], [9, 8, 7, 6, 5, 4, 3, 2, 1]):
        some = [rows[n] for n in chosen]
        assert torch.equal(sampler.probabilities(logits[chosen], some), probabilities[chosen])
        sampled = sampler.sample(logits[chosen], some)
        assert sampled.token_ids == [together.token_ids[n] for n in chosen]
        assert sampled.logprobs == [together.logprobs[n] for n in chosen]


def test_pieces_of_a_batch_have_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(2))
    rows = [row(seed=n, top_p=0.8, temperature=float(n != 4)) for n in range(9)]
    whole = Sampler(50).sample(logits, rows), Sampler(50).probabilities(logits, rows).tolist()
    monkeypatch.setattr("triblade.spec.sampler.CELLS_AT_ONCE", 100)
    assert (Sampler(50).sample(logits, rows), Sampler(50).probabilities(logits, rows).tolist()) == whole


def generated(rows_beside: list[SamplerRow], seed: int, length: int = 12) -> list[int]:
    """Twelve tokens of one seeded request, with the same neighbours in every step."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(3))[: 1 + len(rows_beside)]
    rows = [[row(seed=seed, position=position), *rows_beside] for position in range(length)]
    return [Sampler(100).sample(logits, batch).token_ids[0] for batch in rows]


def test_a_seeded_request_repeats_beside_any_neighbour() -> None:
    alone = generated([], seed=11)
    neighbours = [[row(seed=5)], [row(seed=11)], [row(temperature=0.0), row(seed=99, top_k=2)]]
    assert [generated(beside, seed=11) for beside in neighbours] == [alone] * 3  # C01, F11
    assert generated([], seed=12) != alone


def test_choices_of_one_request_differ_and_repeat() -> None:
    def all_choices() -> list[list[int]]:
        return [generated([], seed=child_seed(42, index)) for index in range(4)]

    first = all_choices()
    assert len({tuple(choice) for choice in first}) == 4  # C02
    assert all_choices() == first


def test_seeds_of_choices_never_meet() -> None:
    seeds = {child_seed(seed, index) for seed in (-(2**63), -1, *range(40), 2**64 - 1) for index in range(128)}
    assert len(seeds) == 42 * 128  # -1 and 2**64 - 1 are the same 64 bits
    assert all(0 <= seed < 2**64 for seed in seeds)


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 10**6), stream=st.integers(0, 5))
def test_random_numbers_are_a_pure_function(seed: int, position: int, stream: int) -> None:
    value = uniform(seed, position, stream)
    assert 0.0 <= value < 1.0
    assert value * 2**53 == int(value * 2**53)
    assert uniform(seed, position, stream) == value
    assert value not in (uniform(seed, position + 1, stream), uniform(seed, position, stream + 1))


def test_random_numbers_are_uniform_along_every_axis() -> None:
    number = 20_000
    for numbers in (
        [uniform(1, n) for n in range(number)],
        [uniform(n, 0) for n in range(number)],
        [uniform(1, 3, n) for n in range(number)],
        [uniform(child_seed(0, n), 5) for n in range(number)],
    ):
        counts = Counter(int(value * 16) for value in numbers)
        assert sum((counts[b] - number / 16) ** 2 / (number / 16) for b in range(16)) < 15 + 4 * math.sqrt(30)
        pairs = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(numbers)) * 12 / number
        assert abs(pairs) < 4 / math.sqrt(number)
