"""Biases of quantized products (Q3): corrected, kept, or on 8-bit levels whose errors count by importance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import tiny_folder, words
from torch import Tensor

from triblade.config import BiasMode, ConvertConfig, EngineConfig
from triblade.models.loader import open_model
from triblade.quant.bias import bias_importance, rounded_bias
from triblade.quant.convert import convert
from triblade.quant.passes import Work
from triblade.quant.scheme import QuantScheme
from triblade.quant.statistics import Accumulator

MODULE = "model.layers.0.mlp.down_proj"


def work_of(weight: Tensor, inputs: Tensor) -> Work:
    accumulator = Accumulator("w")
    accumulator.add(inputs)
    scheme = QuantScheme(bits=4, group_size=None, symmetric=False)
    return Work(name="w", weight=weight, scheme=scheme, scale_type=torch.float16, statistics=accumulator.result())


def test_importance_is_one_over_the_spread_of_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 8, generator=generator) * torch.tensor([1.0, 1, 1, 100, 1, 0])[:, None]
    inputs = torch.randn(1000, 8, generator=generator)
    found = bias_importance(work_of(weight, inputs))
    spread = (inputs @ weight.T).square().mean(0)
    torch.testing.assert_close(found[:5], 1 / spread[:5], rtol=1e-4, atol=0)
    assert torch.isfinite(found[5])
    assert found[5] > found[:5].max()


@pytest.mark.parametrize("size", [64, 48, 7])
def test_levels_are_few_and_near(size: int) -> None:
    bias = torch.randn(size, generator=torch.Generator().manual_seed(1))
    found = rounded_bias(bias, torch.ones(size))
    group = 32 if size % 32 == 0 else 16 if size % 16 == 0 else size
    for values, originals in zip(found.split(group), bias.split(group), strict=True):
        step = originals.abs().max() / 127
        assert (values - originals).abs().max() <= 1.01 * step


def test_what_matters_is_rounded_finer() -> None:
    """A large bias of an output with a wide spread may be cut, so that the small ones get finer levels."""
    bias = torch.full((32,), 0.01) * torch.linspace(0.5, 1.5, 32)
    bias[0] = 1.1
    importance = torch.ones(32)
    importance[0] = 1e-6
    errors = [(rounded_bias(bias, some) - bias)[1:].square().sum().item() for some in (torch.ones(32), importance)]
    assert errors[1] < errors[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("bias") / "model", "llama-bias")


def biases(folder: Path, tmp_path: Path, mode: BiasMode, **options: Any) -> Tensor:
    text = tmp_path / "calibration.txt"
    text.write_text(words(1500))
    config = ConvertConfig(
        model=str(folder),
        output=tmp_path / mode,
        group_size=32,
        calibration=str(text),
        calibration_samples=20,
        calibration_length=32,
        threads=1,
        bias=mode,
        quantization="gptq",
    )
    convert(replace(config, **options))
    return open_model(EngineConfig(model=str(config.output))).checkpoint.tensor(f"{MODULE}.bias").float()


def test_every_mode_reaches_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    original = open_model(EngineConfig(model=str(folder))).checkpoint.tensor(f"{MODULE}.bias").float()
    kept, corrected, levels = (biases(folder, tmp_path, mode) for mode in ("keep", "correct", "int8"))
    assert torch.equal(kept, original)
    assert not torch.equal(corrected, original)
    assert not torch.equal(levels, corrected)
    assert (levels - corrected).norm() < 0.02 * corrected.norm()


def test_without_calibration_levels_are_those_of_the_bias_itself(folder: Path, tmp_path: Path) -> None:
    original = open_model(EngineConfig(model=str(folder))).checkpoint.tensor(f"{MODULE}.bias").float()
    found = biases(folder, tmp_path, "int8", quantization="rtn", calibration=None)
    expected = rounded_bias(original, torch.ones(len(original))).bfloat16().float()
    assert torch.equal(found, expected)
