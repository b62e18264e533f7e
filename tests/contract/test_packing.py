"""Packed matrices: nothing is lost on the way into the kernels' layout, from dense weights, GGUF blocks and rounding at load."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from triblade.ops.packing import Format, QuantizedMatrix, interleaved_halves, pack_dense, pack_quantized, unpack
from triblade.quant import rtn
from triblade.quant.gguf_blocks import KERNEL_TYPES, quantized_matrix
from triblade.quant.rtn import round_to_nearest


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("inputs", [1, 2, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_round_trip(dtype: torch.dtype, inputs: int, rows: int) -> None:
    weight = randn(rows, inputs).to(dtype)
    packed = pack_dense(weight, randn(rows))
    assert packed.bias is not None
    assert packed.bias.shape == (-(-rows // 16) * 16,)
    back = unpack(packed)
    assert back.shape == (rows, inputs + (inputs % 2 if dtype == torch.bfloat16 else 0))
    assert torch.equal(back[:, :inputs], weight.float())
    assert (back[:, inputs:] == 0).all()


@pytest.mark.parametrize("rows", [3, 16, 35])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("affine", [False, True])
def test_quantized_round_trip(bits: int, affine: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = QuantizedMatrix(
        codes=torch.randint(0, 2**bits, (rows, 96), generator=generator).to(torch.uint8),
        scales=randn(rows, 3).half(),
        offsets=randn(rows, 3, seed=1).half() if affine else None,
        bits=bits,
    )
    packed = pack_quantized(matrix)
    assert packed.weights.nbytes == -(-rows // 16) * 16 * 96 * bits // 8
    torch.testing.assert_close(unpack(packed), matrix.dequantize(), atol=1e-5, rtol=1e-6)


def test_where_the_first_codes_lie() -> None:
    """Byte 4 r + j of a block: inputs j and 4 + j of row r, as csrc/kernels.h says."""
    codes = torch.zeros(16, 16, dtype=torch.uint8)
    codes[5, 2], codes[5, 6], codes[5, 9] = 3, 7, 12
    matrix = QuantizedMatrix(codes=codes, scales=torch.ones(16, 1).half(), offsets=None, bits=4)
    weights = pack_quantized(matrix).weights.flatten()
    assert weights.nonzero().flatten().tolist() == [4 * 5 + 2, 64 + 4 * 5 + 1]
    assert weights[22] == 3 | 7 << 4
    assert weights[64 + 21] == 12


def test_gate_and_up_blocks_alternate() -> None:
    order = interleaved_halves(96)
    assert order[:16].tolist() == list(range(16))
    assert order[16:32].tolist() == list(range(48, 64))
    assert order[32:48].tolist() == list(range(16, 32))
    assert sorted(order.tolist()) == list(range(96))


@pytest.mark.parametrize("kind", sorted(KERNEL_TYPES))
def test_gguf_blocks_are_the_numbers_that_gguf_means(kind: Type) -> None:
    stored = gguf.quants.quantize((randn(33, 128) * 3).numpy(), kind)
    matrix = quantized_matrix(stored, kind)
    assert matrix is not None
    expected = torch.from_numpy(gguf.quants.dequantize(stored, kind))
    torch.testing.assert_close(matrix.dequantize(), expected, atol=0, rtol=1e-6)
    torch.testing.assert_close(unpack(pack_quantized(matrix)), expected, atol=1e-6, rtol=1e-6)
    assert matrix.group == 32


def test_other_gguf_types_have_no_kernel() -> None:
    assert quantized_matrix(np.zeros((2, 22), np.uint8), Type.Q5_0) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64])
def test_round_to_nearest_error(bits: int, group: int) -> None:
    """Without shrinking, half a step, and a whole one at the short end of the range; shrinking only lowers the squared error."""
    weight = randn(40, 128) * torch.logspace(-3, 2, 40)[:, None]
    weight[7] = 0
    matrix = round_to_nearest(weight, bits, group)
    groups = weight.unflatten(1, (-1, group))
    error = matrix.dequantize().unflatten(1, (-1, group)) - groups
    half_steps = groups.abs().amax(2) / 2 ** (bits - 1) / 2
    assert (error.square().sum(2) <= group * half_steps.square() * 1.5 + 1e-12).all()
    if bits == 8:
        assert (error.abs() <= half_steps[..., None] * (2 + 2**-9) + 1e-7).all()
    assert (matrix.dequantize()[7] == 0).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_matrix_rounded_in_pieces_is_its_rows_rounded_alone(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(10, 64).bfloat16()
    alone = [round_to_nearest(row[None], bits, 32) for row in weight]
    monkeypatch.setitem(rtn.CELLS_AT_ONCE, "cpu", 3 * 64)
    whole = round_to_nearest(weight, bits, 32)
    assert torch.equal(whole.codes, torch.cat([row.codes for row in alone]))
    assert torch.equal(whole.scales, torch.cat([row.scales for row in alone]))


def test_weights_on_the_grid_are_kept_exactly() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32] = 0  # the end of the range is used, so the step is known
    weight = (codes - 8) * 2.0**-5
    matrix = round_to_nearest(weight, 4, 32)
    assert torch.equal(matrix.dequantize(), weight)
    assert matrix.scales.unique().tolist() == [2.0**-5]


@pytest.mark.parametrize("packed", [pack_dense(randn(20, 6), None), pack_dense(randn(20, 6).bfloat16(), randn(20))])
def test_size_counts_everything(packed: object) -> None:
    from triblade.ops.packing import PackedMatrix

    assert isinstance(packed, PackedMatrix)
    expected = 32 * 6 * (4 if packed.format == Format.FP32 else 2) + (0 if packed.bias is None else 32 * 4)
    assert packed.nbytes == expected
