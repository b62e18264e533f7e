"""Matrices with one scale per row on the emulated CUDA kernels: the same numbers in groups that the kernels know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_models import CPU, config_of, cuda_executor, cuda_tiny, kernel_folder, reference_executor, relative
from native_models import all_logits
from quantized import write_tiny
from tiny import prompt

from triblade.models.checkpoint import open_checkpoint
from triblade.ops.cuda.packing import finer_groups, pack_codes, unpack
from triblade.ops.packing import QuantizedMatrix
from triblade.quant.device_weights import DeviceReader
from triblade.quant.scheme import QuantScheme


def test_finer_groups_are_the_same_matrix() -> None:
    matrix = QuantizedMatrix(
        codes=torch.randint(0, 256, (32, 384), dtype=torch.uint8),
        scales=(torch.rand(32, 1) * 1e-3 + 1e-4).half(),
        offsets=torch.randn(32, 1).half(),
        bits=8,
    )
    finer = finer_groups(matrix)
    assert finer.group == 128
    torch.testing.assert_close(unpack(pack_codes(finer, torch.bfloat16)), matrix.dequantize())


@pytest.mark.parametrize("activation_bits", [None, 8])
def test_a_checkpoint_with_scales_per_row(
    activation_bits: int | None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also one that was made for inputs of 8 bits: its matrices stay codes, its inputs are not rounded."""
    model = cuda_tiny("llama", num_hidden_layers=1)
    config = config_of(model)
    scheme = QuantScheme(bits=8, group_size=None, symmetric=True, activation_bits=activation_bits)
    checkpoint = open_checkpoint(write_tiny(tmp_path / "w8", model, "compressed-tensors", scheme))
    layer = DeviceReader(checkpoint, config, torch.bfloat16, CPU).read().layers[0]
    assert [m.bits for m in (layer.qkv, layer.output, layer.gate_up, layer.down)] == [8] * 4
    ours = all_logits(cuda_executor(checkpoint, config, kernel_folder(tmp_path_factory)), prompt(20))
    expected = all_logits(reference_executor(checkpoint, config, "bfloat16", torch.float32), prompt(20))
    rounded = all_logits(reference_executor(checkpoint, config, "bfloat16", torch.bfloat16), prompt(20))
    assert relative(ours, expected) < 1.25 * relative(rounded, expected)
