"""Products with inputs rounded to 8 bits, on the emulated device: against the formula, and read from a checkpoint made for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_models import CPU, config_of, cuda_executor, cuda_tiny, kernel_folder, relative
from emulated_device import EmulatedDevice
from native_models import sequence
from quantized import write_tiny
from tiny import prompt
from torch import Tensor

from triblade.engine.scheduler import ScheduledRequest
from triblade.models.checkpoint import open_checkpoint
from triblade.ops.cuda.linear import ROWS, Activations, LinearKernels
from triblade.ops.cuda.packing import DeviceMatrix, finer_groups, pack_codes, unpack
from triblade.ops.packing import QuantizedMatrix
from triblade.ops.reference import ReferenceBackend
from triblade.quant.device_weights import DeviceReader
from triblade.quant.scheme import QuantScheme

W8A8 = QuantScheme(bits=8, group_size=None, symmetric=True, activation_bits=8)


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(kernel_folder(tmp_path_factory))


def row_matrix(rows: int, inputs: int) -> QuantizedMatrix:
    return QuantizedMatrix(
        codes=torch.randint(0, 256, (rows, inputs), dtype=torch.uint8),
        scales=(torch.rand(rows, 1) * 1e-3 + 1e-4).half(),
        offsets=None,
        bits=8,
        bias=torch.randn(rows),
    )


def packed(matrix: QuantizedMatrix, dtype: torch.dtype, *, is_gated: bool = False) -> DeviceMatrix:
    return replace(pack_codes(finer_groups(matrix), dtype, is_gated=is_gated), row_scales=matrix.scales[:, 0].float())


def formula(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """x W^T + b with the inputs' integers."""
    scales = x.float().abs().amax(1, keepdim=True) / 127
    rounded = (x.float() / scales).round() * scales
    assert matrix.bias is not None
    return rounded @ matrix.dequantize().T + matrix.bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "is_gated"), [(100, False), (96, True)])
def test_products(dtype: torch.dtype, rows: int, is_gated: bool, device: EmulatedDevice) -> None:
    """With bias, residual in place, and gated; tokens of very different sizes, each with its own scale."""
    torch.manual_seed(0)
    matrix = row_matrix(rows, 192)
    kernels = LinearKernels(device, dtype, CPU)
    ours = packed(matrix, dtype, is_gated=is_gated)
    kernels.reserve([ours])
    x = (torch.randn(300, 192) * torch.logspace(-2, 1, 300)[:, None]).to(dtype)
    before = torch.randn(300, rows).to(dtype)
    expected = formula(x, matrix)
    if is_gated:
        out = torch.empty(300, rows // 2, dtype=dtype)
        kernels.multiply(Activations(x, 300, ROWS), ours, out)
        expected = ReferenceBackend().gated_activation(expected, "silu")
    else:
        out = before.clone()
        kernels.multiply(Activations(x, 300, ROWS), ours, out, out)
        expected = expected + before.float()
    assert relative(out, expected) < (6e-3 if dtype == torch.bfloat16 else 8e-4)


def test_finer_groups_are_the_same_matrix() -> None:
    matrix = row_matrix(32, 384)
    finer = finer_groups(matrix)
    assert finer.group == 128
    torch.testing.assert_close(unpack(pack_codes(finer, torch.bfloat16)), matrix.dequantize())


def test_a_checkpoint_for_rounded_inputs(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its matrices stay codes, of 8 bits; long prompts go through integers, short ones do not."""
    model = cuda_tiny("llama", num_hidden_layers=1, max_position_embeddings=320)
    config = config_of(model)
    checkpoint = open_checkpoint(write_tiny(tmp_path / "w8a8", model, "compressed-tensors", W8A8))
    weights = DeviceReader(checkpoint, config, torch.bfloat16, CPU).read()
    layer = weights.layers[0]
    assert all(m.bits == 8 and m.row_scales is not None for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
    executor = cuda_executor(checkpoint, config, kernel_folder(tmp_path_factory))
    results = []
    for sizes in ((270,), (90, 90, 90)):
        request = sequence(0, prompt(270))
        for size in sizes:
            executor.forward([ScheduledRequest.next(request, size)])
            request.num_computed_tokens += size
        scores = executor.score([sizes[-1] - 1], with_logits=True)
        assert scores.logits is not None
        results.append(scores.logits.clone())
    assert 1e-4 < relative(results[0], results[1]) < 5e-2
