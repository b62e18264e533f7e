"""Schemes and integer matrices: what is accepted, what a matrix means, what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triblade.errors import CheckpointError, ConfigError, TribladeError, UnsupportedError
from triblade.quant.scheme import IntegerMatrix, QuantScheme


def scheme(bits: int = 4, group_size: int | None = 2, symmetric: bool = True, **more: Any) -> QuantScheme:
    return QuantScheme(bits=bits, group_size=group_size, symmetric=symmetric, **more)


@pytest.mark.parametrize(("bits", "zero", "largest"), [(2, 2, 3), (3, 4, 7), (4, 8, 15), (8, 128, 255)])
def test_codes_of_each_width(bits: int, zero: int, largest: int) -> None:
    assert (scheme(bits).zero_point, scheme(bits).max_code) == (zero, largest)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bits": 5}, UnsupportedError),
        ({"bits": 0}, UnsupportedError),
        ({"group_size": 0}, ConfigError),
        ({"group_size": -1}, ConfigError),
        ({"bits": 8, "activation_bits": 4}, UnsupportedError),
        ({"bits": 4, "activation_bits": 8}, UnsupportedError),
    ],
    ids=str,
)
def test_impossible_schemes_are_refused(fields: dict[str, Any], error: type[TribladeError]) -> None:
    with pytest.raises(error):
        scheme(**fields)


def test_groups_divide_the_row_or_the_error_names_one_that_does() -> None:  # B11
    assert scheme(group_size=64).groups(576) == 9
    assert scheme(group_size=None).groups(576) == 1
    with pytest.raises(ConfigError, match="576 inputs are not divisible by the group size 128") as failure:
        scheme(group_size=128).groups(576)
    assert failure.value.hint == "use 64"
    with pytest.raises(ConfigError) as failure:
        scheme(group_size=64).groups(33)
    assert failure.value.hint == "use one scale per row"


@pytest.mark.parametrize(
    ("made", "bits", "name"),
    [
        (scheme(4, 64), 4.25, "W4 g64 sym"),
        (scheme(4, 64, symmetric=False), 4.3125, "W4 g64 asym"),
        (scheme(8, None, activation_bits=8), 8 + 16 / 128, "W8A8 row sym"),
    ],
    ids=str,
)
def test_average_bits_count_scales_and_zero_points(made: QuantScheme, bits: float, name: str) -> None:
    assert made.bits_per_weight(128) == bits
    assert str(made) == name


def test_a_matrix_is_scale_times_code_less_zero() -> None:
    codes = torch.tensor([[0, 15, 8, 9]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16)
    symmetric = IntegerMatrix(codes=codes, scales=scales, zero_points=None, scheme=scheme())
    assert symmetric.dequantize().tolist() == [[-4.0, 3.5, 0.0, 2.0]]
    zeros = torch.tensor([[0, 15]], dtype=torch.uint8)
    shifted = IntegerMatrix(codes=codes, scales=scales, zero_points=zeros, scheme=scheme(symmetric=False))
    assert shifted.dequantize().tolist() == [[0.0, 7.5, -14.0, -12.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes": torch.zeros(3, 4)},
        {"scales": torch.zeros(3, 2, dtype=torch.int8)},
        {"scales": torch.zeros(3, 1, dtype=torch.float16)},
        {"zero_points": torch.zeros(3, 2, dtype=torch.uint8)},
        {"scheme": scheme(symmetric=False)},
        {"scheme": scheme(symmetric=False), "zero_points": torch.zeros(3, 1, dtype=torch.uint8)},
        {"bias": torch.zeros(4)},
    ],
    ids=",".join,
)
def test_parts_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "codes": torch.zeros(3, 4, dtype=torch.uint8),
        "scales": torch.ones(3, 2, dtype=torch.float16),
        "zero_points": None,
        "scheme": scheme(),
    }
    IntegerMatrix(**right)
    with pytest.raises(CheckpointError):
        IntegerMatrix(**right | wrong)
