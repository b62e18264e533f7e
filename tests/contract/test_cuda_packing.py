"""The layout of the CUDA kernels' weights: packing and its inverse, and which matrices it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_device import EmulatedDevice

from triblade.ops.backend import Linear
from triblade.ops.cuda.linear import ROWS, WIDE, Activations, LinearKernels
from triblade.ops.cuda.packing import pack_codes, pack_dense, tile_order, unpack, why_not_dense, why_not_packed
from triblade.ops.cuda.tilings import (
    Tiling,
    WideTiling,
    key_of,
    measured_tilings,
    partial_numbers,
    tiling,
    wide_tiling,
    wide_tilings,
)
from triblade.ops.packing import QuantizedMatrix


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(("rows", "is_gated"), [(16, False), (72, False), (96, True)])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_unpack_gives_back_what_was_packed(bits: int, has_offsets: bool, rows: int, is_gated: bool, group: int) -> None:
    torch.manual_seed(0)
    matrix = QuantizedMatrix(
        codes=torch.randint(0, 1 << bits, (rows, 256), dtype=torch.uint8),
        scales=torch.rand(rows, 256 // group).half(),
        offsets=torch.randn(rows, 256 // group).half() if has_offsets else None,
        bits=bits,
    )
    packed = pack_codes(matrix, torch.bfloat16, is_gated=is_gated)
    torch.testing.assert_close(unpack(packed), matrix.dequantize(), rtol=0, atol=1e-5)
    assert packed.nbytes >= rows * 256 * bits // 8


def test_a_load_is_a_lanes_registers() -> None:
    """The word of step s of lane 4 g + t has row g's inputs 32 (s / 2) + 8 t + 4 (s % 2) on in its lowest nibbles."""
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    g, t, step = 5, 2, 3
    first = 32 * (step // 2) + 8 * t + 4 * (step % 2)
    codes[g, first : first + 4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    codes[g + 8, first : first + 4] = torch.tensor([5, 6, 7, 8], dtype=torch.uint8)
    matrix = QuantizedMatrix(codes=codes, scales=torch.ones(16, 1).half(), offsets=None, bits=4)
    words = pack_codes(matrix, torch.bfloat16).codes.view(torch.int32).flatten()
    nibbles = [(1, 5, 3, 7), (2, 6, 4, 8)]  # the first of each pair, then the second, in the upper half
    expected = sum(code << 4 * (i + 4 * e) for e, pair in enumerate(nibbles) for i, code in enumerate(pair))
    assert int(words[(4 * g + t) * 4 + step]) & 0xFFFFFFFF == expected
    assert int(words.count_nonzero()) == 1


def test_dense_matrices_are_not_copied() -> None:
    weight = torch.randn(32, 64).bfloat16()
    packed = pack_dense(Linear(weight, torch.arange(32.0).bfloat16()), is_gated=True)
    assert packed.codes.data_ptr() == weight.data_ptr()
    assert packed.tile_bias is not None
    assert packed.tile_bias[:16].tolist() == [*range(8), *range(16, 24)]


def test_gated_tiles_hold_both_halves() -> None:
    assert tile_order(32).tolist() == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


def test_what_the_kernels_do_not_take() -> None:
    assert why_not_packed(576, 64) is None
    assert why_not_packed(576, 16) == "groups of 16 inputs (CUDA kernels: 32, 64, 128)"
    assert why_not_packed(576, 128) == "576 inputs in groups of 128"
    assert why_not_dense(100) == "100 inputs (CUDA kernels: a multiple of 64)"


@pytest.mark.parametrize("rows", [64, 4608, 37888])
@pytest.mark.parametrize("columns", [1, 2, 4, 8])
def test_every_product_can_be_cut(rows: int, columns: int) -> None:
    """Parts along the inputs are not empty, and what warps exchange fits the memory they share."""
    matrix = pack_dense(Linear(torch.empty(rows, 576, device="meta")))
    cut = tiling(matrix, columns)
    assert cut.token_tiles == columns
    assert 1 <= cut.warps_along_inputs * cut.splits <= 9
    assert (cut.warps_along_inputs - 1) * cut.warps_along_rows * cut.row_tiles * columns * 512 < 48 * 1024
    assert (partial_numbers(matrix, cut) > 0) == (cut.splits > 1)


@pytest.mark.parametrize(("rows", "inputs"), [(64, 64), (960, 576), (3584, 18944), (37888, 3584)])
@pytest.mark.parametrize("columns", [4, 8])
def test_every_wide_product_can_be_cut(rows: int, inputs: int, columns: int) -> None:
    """The rule takes one of the cuts that make sense, all of which leave every block something to do."""
    matrix = pack_dense(Linear(torch.empty(rows, inputs, device="meta")))
    assert wide_tiling(matrix, columns) in wide_tilings(matrix, columns)
    for cut in wide_tilings(matrix, columns):
        assert cut.splits <= inputs // 64
        assert cut.threads <= 672


def test_measured_tilings_are_whole() -> None:
    """The table that comes with the package is one that the rules can read, for the matrices it names."""
    for key, numbers in measured_tilings(90).items():
        cut = Tiling(*numbers) if len(numbers) == 7 else WideTiling(*numbers)
        assert key.endswith(f"{'t' if len(numbers) == 7 else 'w'}{cut.token_tiles}")
        assert cut.threads <= 672
    assert key_of(pack_dense(Linear(torch.empty(32, 64)), is_gated=True), 4) == "16 bits g0 32x64 gated t4"


@pytest.mark.parametrize("has_warpgroups", [True, False])
def test_layouts_of_inputs(tmp_path: Path, has_warpgroups: bool) -> None:
    kernels = LinearKernels(
        EmulatedDevice(tmp_path, has_warpgroups=has_warpgroups), torch.bfloat16, torch.device("cpu")
    )
    wide = WIDE if has_warpgroups else 0
    assert [kernels.layout(n) for n in (1, 8, 9, 16)] == [1, 1, 2, 2]
    assert [kernels.layout(n) for n in (17, 33, 64, 128)] == [4 | wide, 8 | wide, 8 | wide, 8 | wide]
    assert [kernels.layout(n) for n in (129, 257)] == [8 | wide if has_warpgroups else ROWS, ROWS]
    assert [kernels.head_layout(n) for n in (5, 16, 17)] == [1, 2, ROWS]
    kernels.reserve([pack_dense(Linear(torch.empty(32, 64)))])
    assert [kernels.layout(n) for n in (16, 17)] == [2, ROWS]
    room = Activations.empty(70, 64, 8 | WIDE, torch.bfloat16, torch.device("cpu"))
    assert room.values.shape == (128, 64)
    assert room.slab(1) - room.slab(0) == 64 * 64 * 2
