"""The numerics of quantization against plain formulas: range search, feedback, refinement, correction, channel scales."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
import torch
from layers import FixedLayer, fixed_layer
from torch import Tensor

from triblade.errors import NumericalError
from triblade.quant.correct import corrected_weight
from triblade.quant.gptq import conditional_variances, inverse_factor, round_with_feedback
from triblade.quant.ranges import plain_grid, search_grid, storable
from triblade.quant.refine import improve_codes, refine, refit_scales, row_errors
from triblade.quant.rescale import activation_scales, balanced_scales, migration_scales
from triblade.quant.scheme import BITS, QuantScheme
from triblade.quant.statistics import Accumulator, second_moment

W3 = QuantScheme(bits=3, group_size=32, symmetric=False)


@pytest.fixture(scope="module")
def layer() -> FixedLayer:
    return fixed_layer()


def hessian(layer: FixedLayer) -> Tensor:
    return layer.statistics.hessian


# Range search.


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_the_search_never_loses_to_the_extremes(bits: int, symmetric: bool, layer: FixedLayer) -> None:
    scheme = QuantScheme(bits=bits, group_size=32, symmetric=symmetric)
    importance = hessian(layer).diagonal()

    def error(grid) -> Tensor:  # type: ignore[no-untyped-def]
        lost = (grid.values(grid.codes(layer.weight)) - layer.weight).square() * importance
        return lost.unflatten(1, (-1, 32)).sum(2)

    plain = plain_grid(layer.weight, scheme, torch.float16)
    searched = search_grid(layer.weight, importance, scheme, torch.float16)
    # The floor under the importance changes what is minimised by a ten-thousandth.
    assert (error(searched) <= error(plain) * 1.001).all()
    assert error(searched).sum() < error(plain).sum()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_rounded_before_codes_are_chosen(dtype: torch.dtype, layer: FixedLayer) -> None:
    grid = search_grid(layer.weight, None, W3, dtype)
    assert torch.equal(grid.scales, grid.scales.to(dtype).float())
    assert torch.equal(grid.zeros, grid.zeros.round())
    assert grid.zeros.min() >= 0
    assert grid.zeros.max() <= 7
    codes = grid.codes(layer.weight)
    assert torch.equal(grid.matrix(codes, dtype).dequantize(), grid.values(codes))


def test_rows_do_not_depend_on_how_many_are_searched_at_once(
    layer: FixedLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search_grid(layer.weight, None, W3, torch.float16)
    monkeypatch.setattr("triblade.quant.ranges.ELEMENTS_AT_ONCE", 5 * 64)
    parts = search_grid(layer.weight, None, W3, torch.float16)
    assert torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.zeros, parts.zeros)


def test_no_importance_is_the_same_for_all(layer: FixedLayer) -> None:  # B20
    zero = search_grid(layer.weight, torch.zeros(64), W3, torch.float16)
    none = search_grid(layer.weight, None, W3, torch.float16)
    assert torch.equal(zero.scales, none.scales)
    some = torch.zeros(64)
    some[:5] = 1
    assert torch.isfinite(search_grid(layer.weight, some, W3, torch.float16).scales).all()


@pytest.mark.parametrize("bits", BITS)
def test_importance_that_is_not_finite_is_an_error(bits: int, layer: FixedLayer) -> None:  # B20, B21
    scheme = QuantScheme(bits=bits, group_size=32, symmetric=False)
    with pytest.raises(NumericalError):
        search_grid(layer.weight, torch.full((64,), math.nan), scheme, torch.float16)
    with pytest.raises(NumericalError):
        search_grid(layer.weight / 0, None, scheme, torch.float16)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_one_scale_per_row_is_neither_zero_nor_wrong(bits: int, symmetric: bool, layer: FixedLayer) -> None:  # B13
    scheme = QuantScheme(bits=bits, group_size=None, symmetric=symmetric)
    grid = search_grid(layer.weight, None, scheme, torch.float16)
    rounded = grid.matrix(grid.codes(layer.weight), torch.float16).dequantize()
    width = layer.weight.amax(1) - layer.weight.amin(1)
    assert grid.scales.shape == (48, 1)
    assert ((rounded - layer.weight).square().mean(1).sqrt() < width / (1 << bits)).all()
    assert (rounded != 0).any(1).all()


@pytest.mark.parametrize("symmetric", [False, True])
def test_groups_of_zeros_and_of_one_sign(symmetric: bool) -> None:
    scheme = QuantScheme(bits=4, group_size=4, symmetric=symmetric)
    weight = torch.tensor([[0.0] * 4 + [1.0, 2.0, 3.0, 4.0] + [-1.0, -2.0, -3.0, -4.0]])
    grid = search_grid(weight, None, scheme, torch.float16)
    found = grid.matrix(grid.codes(weight), torch.float16).dequantize()
    assert (found[:, :4] == 0).all()
    torch.testing.assert_close(found, weight, atol=0.26, rtol=0)


def test_what_cannot_be_stored_becomes_the_nearest_that_can() -> None:
    scales = storable(torch.tensor([1e-9, 1e9, -1e9, 0.0, 0.1]), torch.float16)
    assert scales.tolist() == pytest.approx([6.103515625e-05, 65504, -65504, 1, 0.0999755859375])


# Feedback.


def test_feedback_with_independent_inputs_is_rounding_to_nearest(layer: FixedLayer) -> None:
    grid = search_grid(layer.weight, None, W3, torch.float16)
    codes = round_with_feedback(layer.weight, torch.diag(torch.rand(64) + 0.5), grid)
    assert torch.equal(codes, grid.codes(layer.weight))


def test_feedback_equals_the_textbook(layer: FixedLayer) -> None:
    """One column at a time with the inverse updated by elimination (Frantar et al. 2023, equations 2 and 3)."""
    grid = search_grid(layer.weight, None, W3, torch.float16)
    matrix = hessian(layer)
    order = matrix.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(matrix[order][:, order])
    assert factor is not None
    inverse = (factor.T @ factor).double()
    weight, codes = layer.weight[:, order].double(), torch.empty(48, 64)
    for i in range(64):
        group = order[i] // 32
        scale, zero = grid.scales[:, group].double(), grid.zeros[:, group].double()
        codes[:, order[i]] = (weight[:, i] / scale + zero).round().clamp(0, 7).float()
        error = (weight[:, i] - (codes[:, order[i]] - zero) * scale) / inverse[i, i]
        weight -= torch.outer(error, inverse[i])
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    found = round_with_feedback(layer.weight, matrix, grid)
    assert (found == codes).float().mean() > 0.995  # ties of float32 against float64


def test_dead_inputs_are_harmless(layer: FixedLayer) -> None:  # B10
    matrix = hessian(layer).clone()
    matrix[7], matrix[:, 7] = 0, 0
    grid = search_grid(layer.weight, matrix.diagonal(), W3, torch.float16)
    codes = round_with_feedback(layer.weight, matrix, grid)
    assert torch.isfinite(codes).all()
    assert torch.equal(codes[:, 7], grid.codes(layer.weight)[:, 7])
    assert torch.isfinite(improve_codes(layer.weight, matrix, grid, codes)).all()
    assert torch.isfinite(conditional_variances(matrix)).all()


def test_a_singular_hessian_is_damped() -> None:  # B09: 8 tokens, 576 inputs
    wide = fixed_layer(rows=8, inputs=576, tokens=8)
    matrix = wide.inputs.T @ wide.inputs / 8
    grid = search_grid(
        wide.weight, matrix.diagonal(), QuantScheme(bits=4, group_size=64, symmetric=False), torch.float16
    )
    codes = round_with_feedback(wide.weight, matrix, grid)
    assert torch.isfinite(codes).all()
    plain, better = (row_errors(wide.weight, grid.values(c), matrix).sum() for c in (grid.codes(wide.weight), codes))
    assert better < plain


def test_a_hopeless_hessian_falls_back_and_says_which_module(
    layer: FixedLayer, caplog: pytest.LogCaptureFixture
) -> None:  # B09
    matrix = hessian(layer) - 1e6 * torch.eye(64)
    matrix.fill_diagonal_(1.0)
    matrix[0, 1] = matrix[1, 0] = 1e9
    grid = search_grid(layer.weight, None, W3, torch.float16)
    with caplog.at_level(logging.WARNING, "triblade"):
        codes = round_with_feedback(layer.weight, matrix, grid, "model.layers.3.mlp.down_proj")
    assert torch.equal(codes, grid.codes(layer.weight))
    assert "model.layers.3.mlp.down_proj" in caplog.text


def test_conditional_variances_are_those_of_the_decomposition(layer: FixedLayer) -> None:
    """sum e_i^2 D_i for errors that feedback leaves alone: D is the diagonal of H = L^T D L in the order of rounding."""
    matrix = hessian(layer).double()
    order = matrix.diagonal().argsort(descending=True, stable=True)
    damped = matrix[order][:, order] + 0.005 * matrix.diagonal().mean() * torch.eye(64)
    flipped = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)  # H = R R^T with R upper: last input eliminated first
    expected = torch.empty(64, dtype=torch.double)
    expected[order] = flipped.diagonal().square()
    torch.testing.assert_close(conditional_variances(matrix.float()).double(), expected, rtol=2e-3, atol=0)


# Refinement.


def test_refinement_lowers_the_error_of_every_row(layer: FixedLayer) -> None:
    matrix = hessian(layer)
    grid = search_grid(layer.weight, matrix.diagonal(), W3, torch.float16)
    codes = round_with_feedback(layer.weight, matrix, grid)
    errors = [row_errors(layer.weight, grid.values(codes), matrix)]
    swept = improve_codes(layer.weight, matrix, grid, codes)
    errors.append(row_errors(layer.weight, grid.values(swept), matrix))
    fitted = refit_scales(layer.weight, matrix, grid, swept, torch.float16)
    errors.append(row_errors(layer.weight, fitted.values(swept), matrix))
    best, best_codes = refine(layer.weight, matrix, grid, codes, torch.float16)
    errors.append(row_errors(layer.weight, best.values(best_codes), matrix))
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-5)).all()
    assert errors[-1].sum() < 0.95 * errors[0].sum()
    assert torch.equal(fitted.scales, fitted.scales.half().float())


def test_a_code_is_the_best_one_given_the_others(layer: FixedLayer) -> None:
    """After enough sweeps no single change of a code helps."""
    matrix = hessian(layer)
    weight = layer.weight[:3]
    grid = search_grid(weight, None, W3, torch.float16)
    codes = grid.codes(weight)
    for _ in range(60):
        codes = improve_codes(weight, matrix, grid, codes)
    least = row_errors(weight, grid.values(codes), matrix)
    for column in range(0, 64, 7):
        for step in (-1, 1):
            other = codes.clone()
            other[:, column] = (other[:, column] + step).clamp(0, 7)
            assert (row_errors(weight, grid.values(other), matrix) >= least * (1 - 1e-4)).all()


def test_scales_solve_the_least_squares_problem(layer: FixedLayer) -> None:
    """In float32 storage the fitted scales are those of torch.linalg.lstsq on the outputs."""
    grid = search_grid(layer.weight, None, W3, torch.float32)
    codes = grid.codes(layer.weight)
    fitted = refit_scales(layer.weight, hessian(layer), grid, codes, torch.float32)
    steps = codes - grid.zeros.repeat_interleave(32, 1)
    for row in (0, 17):
        parts = torch.stack([layer.inputs[:, g * 32 :][:, :32] @ steps[row, g * 32 :][:32] for g in (0, 1)], 1)
        expected = torch.linalg.lstsq(parts.double(), (layer.inputs @ layer.weight[row]).double()).solution
        torch.testing.assert_close(fitted.scales[row].double(), expected, rtol=5e-3, atol=0)


# Correction.


def test_correction_is_the_least_squares_answer_to_drifted_inputs(layer: FixedLayer) -> None:
    corrected = corrected_weight(layer.weight, layer.statistics)
    assert layer.error(corrected) < 0.75 * layer.error(layer.weight)
    best = torch.linalg.lstsq(layer.inputs, layer.original @ layer.weight.T).solution.T
    assert layer.error(corrected) < layer.error(best) * 1.3


def test_the_residual_is_made_up_for_as_well(layer: FixedLayer) -> None:
    lack = layer.inputs @ torch.randn(64, 48, generator=torch.Generator().manual_seed(5)) * 0.01
    accumulator = Accumulator("x")
    accumulator.add(layer.inputs, layer.original, lack)
    corrected = corrected_weight(layer.weight, accumulator.result())
    wanted = layer.original @ layer.weight.T + lack

    def distance(weight: Tensor) -> Tensor:
        return (layer.inputs @ weight.T - wanted).square().sum()

    assert distance(corrected) < distance(corrected_weight(layer.weight, layer.statistics)) < distance(layer.weight)


def test_without_drift_nothing_changes(layer: FixedLayer) -> None:
    accumulator = Accumulator("x")
    accumulator.add(layer.inputs)
    assert corrected_weight(layer.weight, accumulator.result()) is layer.weight


# Channel scales.


@pytest.mark.parametrize("search", [activation_scales, balanced_scales, migration_scales])
def test_shared_channels_get_one_scale(search, layer: FixedLayer) -> None:  # type: ignore[no-untyped-def]
    sharing = torch.arange(64) // 4
    scales = search(layer.weight, layer.statistics, W3, sharing)
    assert (scales > 0).all()
    assert torch.isfinite(scales).all()
    assert torch.equal(scales.view(16, 4), scales.view(16, 4)[:, :1].expand(16, 4))
    assert (scales != 1).any()


@pytest.mark.parametrize("search", [activation_scales, balanced_scales, migration_scales])
def test_dead_channels_do_not_spoil_the_scales(search, layer: FixedLayer) -> None:  # type: ignore[no-untyped-def]
    inputs = layer.inputs.clone()
    inputs[:, 5:9] = 0
    accumulator = Accumulator("x")
    accumulator.add(inputs)
    weight = layer.weight.clone()
    weight[:, 20] = 0
    scales = search(weight, accumulator.result(), W3)
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()


# Statistics.


def test_statistics_are_weighted_by_token_whatever_the_batches() -> None:  # B06
    x, o = torch.randn(97, 10), torch.randn(97, 10)
    accumulator = Accumulator("x")
    for start, end in ((0, 3), (3, 80), (80, 97)):
        accumulator.add(x[start:end], o[start:end])
    found = accumulator.result()
    assert found.tokens == 97
    torch.testing.assert_close(found.hessian, x.T @ x / 97)
    assert found.drift is not None
    torch.testing.assert_close(found.drift, (o - x).T @ x / 97)
    torch.testing.assert_close(found.magnitude, x.abs().mean(0))
    torch.testing.assert_close(found.peak, x.abs().amax(0))


@pytest.mark.parametrize("width", [1, 7, 8])
def test_half_of_the_second_moment_is_enough(width: int) -> None:
    x = torch.randn(20, width)
    torch.testing.assert_close(second_moment(x), x.T @ x)


def test_overflowing_activations_name_the_module() -> None:  # B01
    accumulator = Accumulator("model.layers.3.mlp.down_proj")
    accumulator.add(torch.full((4, 6), math.inf))
    with pytest.raises(NumericalError, match=r"model\.layers\.3\.mlp\.down_proj: its inputs are not finite"):
        accumulator.result()


def test_divided_statistics_are_those_of_divided_inputs(layer: FixedLayer) -> None:
    scales = torch.rand(64) + 0.5
    found = layer.statistics.divided(scales)
    expected = FixedLayer(layer.weight, layer.inputs / scales, layer.original / scales).statistics
    for name in ("hessian", "magnitude", "mean", "peak", "drift", "mean_drift"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
