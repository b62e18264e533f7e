"""Embedding and head as integers: tied stays one tensor, both CPU backends read it, a format without a place for it says so."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interruption import interrupt
from native_models import all_logits, executor_of
from safetensors.torch import load_file
from tiny import PROMPT_TOKENS, prompt
from tiny_folders import tiny_folder, words
from torch import Tensor

from triblade.config import ConvertConfig, EngineConfig
from triblade.errors import ConfigError, TribladeError, UnsupportedError
from triblade.models.decoder import DenseAttend
from triblade.models.loader import open_model
from triblade.ops.reference import ReferenceBackend
from triblade.quant.convert import convert
from triblade.quant.packed_weights import PackingReader
from triblade.quant.passes import Work, recipe
from triblade.quant.quantized_checkpoint import QuantizedCheckpoint
from triblade.quant.refine import row_errors
from triblade.quant.scheme import QuantScheme
from triblade.quant.statistics import Accumulator
from triblade.quant.tables import EMBEDDING, HEAD, quantized_table

IDS = prompt(PROMPT_TOKENS)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tied") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("untied") / "model")


@pytest.fixture
def config(tied: Path, tmp_path: Path) -> ConvertConfig:
    text = tmp_path / "calibration.txt"
    text.write_text(words(1500))
    return ConvertConfig(
        model=str(tied),
        output=tmp_path / "out",
        group_size=32,
        calibration=str(text),
        calibration_samples=20,
        calibration_length=32,
        threads=1,
    )


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("triblade.quant.convert.quantize_layers")


def checkpoint_of(folder: Path) -> QuantizedCheckpoint:
    checkpoint = open_model(EngineConfig(model=str(folder))).checkpoint
    assert isinstance(checkpoint, QuantizedCheckpoint)
    return checkpoint


def reference_logits(folder: Path) -> Tensor:
    opened = open_model(EngineConfig(model=str(folder), dtype="float32"))
    decoder = opened.load(len(IDS), ReferenceBackend(), torch.device("cpu"))
    attend = DenseAttend(decoder.config, decoder.backend, len(IDS))
    return decoder.logits(decoder.forward(torch.tensor(IDS), torch.arange(len(IDS)), attend))


def native_logits(folder: Path) -> Tensor:
    opened = open_model(EngineConfig(model=str(folder), dtype="float32"))
    weights = PackingReader(opened.checkpoint, opened.config, torch.float32).read()
    return all_logits(executor_of(opened.config, weights), IDS)


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("spec", ["8row", "4"])
def test_a_tied_table_stays_one(spec: str, config: ConvertConfig, tied: Path) -> None:  # B22
    dense = convert(replace(config, output=config.output.with_name("dense")))
    report = convert(replace(config, embeddings=spec, lm_head=spec))
    tensors = load_file(config.output / "model.safetensors")
    assert f"{EMBEDDING}.weight_packed" in tensors
    assert f"{EMBEDDING}.weight" not in tensors
    assert not [name for name in tensors if name.startswith(HEAD)]
    scheme = "W8 row asym" if spec == "8row" else "W4 g32 asym"
    assert report.tables == {EMBEDDING: scheme, HEAD: f"tied to {EMBEDDING}"}
    assert report.bytes_after < dense.bytes_after
    assert distance(reference_logits(config.output), reference_logits(tied)) < 0.5
    assert checkpoint_of(config.output).config["tie_word_embeddings"] is True


def test_both_backends_read_a_quantized_table(config: ConvertConfig) -> None:
    convert(replace(config, bits=8, embeddings="8", lm_head="8"))
    assert (
        distance(native_logits(config.output), reference_logits(config.output)) < 0.06
    )  # kernels round inputs to 8 bits


def test_an_untied_head_has_a_scheme_of_its_own(config: ConvertConfig, untied: Path) -> None:
    convert(replace(config, model=str(untied), lm_head="3g32", embeddings="8row"))
    checkpoint = checkpoint_of(config.output)
    assert str(checkpoint.modules[HEAD].scheme) == "W3 g32 asym"
    assert str(checkpoint.modules[EMBEDDING].scheme) == "W8 row asym"
    original = load_file(untied / "model.safetensors")[f"{EMBEDDING}.weight"].float()
    assert distance(checkpoint.tensor(f"{EMBEDDING}.weight"), original) < 0.01
    groups = json.loads((config.output / "config.json").read_text())["quantization_config"]
    assert groups["ignore"] == []
    assert distance(native_logits(config.output), reference_logits(config.output)) < 0.06


def test_one_scheme_for_everything_names_the_class_of_embeddings(config: ConvertConfig) -> None:
    convert(replace(config, embeddings="4", lm_head="4"))
    settings = json.loads((config.output / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    assert group["targets"] == ["Linear", "Embedding"]
    assert settings["ignore"] == [HEAD]


@pytest.mark.parametrize(("layout", "options"), [("awq", {}), ("gptq", {"symmetric": True})])
def test_other_formats_hold_a_head_and_no_embedding(
    layout: Any, options: dict[str, Any], config: ConvertConfig, untied: Path
) -> None:
    config = replace(config, model=str(untied), format=layout, **options)
    with pytest.raises(UnsupportedError, match=r"model\.embed_tokens: .* linear layers only"):
        convert(replace(config, embeddings="4"))
    convert(replace(config, lm_head="4"))
    assert HEAD in checkpoint_of(config.output).modules
    settings = json.loads((config.output / "config.json").read_text())["quantization_config"]
    assert settings["lm_head"] is True
    assert distance(native_logits(config.output), reference_logits(config.output)) < 0.06


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("is_tied", "change", "error", "message"),
    [
        (True, {"lm_head": "8"}, ConfigError, r"the head is the embedding \(tied\)"),
        (True, {"embeddings": "8"}, ConfigError, r"tied\) and cannot be keep where that is 8"),  # B23
        (False, {"lm_head": "8g48"}, ConfigError, "not divisible by the group size 48"),
        (False, {"embeddings": "some"}, ConfigError, "not a scheme: 'some'"),
        (False, {"lm_head": "8", "format": "gptq", "symmetric": True}, UnsupportedError, "one scheme"),
        (False, {"lm_head": "4g64", "format": "awq"}, UnsupportedError, "one group size"),
        (False, {"rules": ("o_proj=8",), "format": "gptq", "symmetric": True}, UnsupportedError, "one scheme"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    is_tied: bool,
    change: dict[str, Any],
    error: type[TribladeError],
    message: str,
    config: ConvertConfig,
    untied: Path,
) -> None:
    with pytest.raises(error, match=message):
        convert(replace(config, model=config.model if is_tied else str(untied), **change))


@pytest.mark.parametrize("layers", [0, 2])
def test_resuming_gives_the_same_tables(
    layers: int, config: ConvertConfig, untied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B26
    config = replace(config, model=str(untied), embeddings="4", lm_head="4")
    whole = replace(config, output=config.output.with_name("whole"))
    convert(whole)
    interrupt(config, layers, monkeypatch)
    with pytest.raises(ConfigError, match="embeddings was 4, now 8"):
        convert(replace(config, embeddings="8", resume=True))
    convert(replace(config, resume=True))
    name = "model.safetensors"
    assert (config.output / name).read_bytes() == (whole.output / name).read_bytes()


def test_a_budget_of_bytes_counts_the_tables(config: ConvertConfig) -> None:
    cheap = convert(config)
    size = os.path.getsize(config.output / "model.safetensors")
    room = replace(config, embeddings="8", lm_head="8", max_size_mb=size / 1e6, output=config.output.with_name("room"))
    report = convert(room)
    assert os.path.getsize(room.output / "model.safetensors") <= size
    assert report.average_bits > cheap.average_bits


def test_statistics_make_a_better_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triblade.quant.tables.ROWS_AT_ONCE", 40)  # the last piece is a short one
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(100, 32, generator=generator)
    inputs = torch.randn(500, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    accumulator = Accumulator(HEAD)
    accumulator.add(inputs)
    statistics = accumulator.result()
    scheme = QuantScheme(bits=3, group_size=16, symmetric=False)
    errors = []
    for known in (None, statistics):
        work = Work(name=HEAD, weight=weight, scheme=scheme, scale_type=torch.float16, statistics=known)
        matrix = quantized_table(work, recipe("gptq"))
        assert matrix.codes.shape == weight.shape
        errors.append(row_errors(weight, matrix.dequantize(), statistics.hessian).sum().item())
    assert errors[1] < 0.7 * errors[0]
