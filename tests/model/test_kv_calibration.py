"""`kv-calibrate` on a tiny model: from text to a table that is measured, checked and served with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_folders import tiny_folder, words

from triblade import cli
from triblade.config import EngineConfig, KVCalibrateConfig
from triblade.engine.build import build_engine
from triblade.errors import ConfigError, QualityError
from triblade.kv.calibration import calibrate
from triblade.kv.wire import RawWire
from triblade.kv.wire_gate import WireGate
from triblade.kv.wire_pca import PcaLutWire
from triblade.kv.wire_table import KVTable


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", "qwen3", head_dim=16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(words(3000))
    return path


@pytest.fixture
def config(model: Path, text: Path, tmp_path: Path) -> KVCalibrateConfig:
    return KVCalibrateConfig(
        model=str(model),
        output=tmp_path / "table.safetensors",
        text=(text,),
        bits=4.0,
        samples=30,
        length=32,
        gradient_samples=10,
        exact_first=2,
        exact_last=6,
        eval_tokens=400,
        threads=1,
    )


def test_from_text_to_a_table_that_an_engine_can_use(config: KVCalibrateConfig) -> None:
    report = calibrate(config)
    table = KVTable.load(config.output)
    assert report.bits_per_number == pytest.approx(4.0, abs=0.02)
    assert report.bytes_per_token == table.bits_per_token / 8
    assert report.tokens == 30 * (32 - 2)
    assert 0 < report.kl < 0.05
    assert report.perplexity == pytest.approx(report.raw_perplexity, rel=0.05)
    assert 0 < report.keys < 0.02
    assert table.figures["nats"] == report.nats > 0
    assert "times less than bfloat16" in str(report)
    engine = build_engine(
        EngineConfig(model=config.model, threads=1, num_kv_blocks=8, device="cpu", backend="reference")
    )
    layout = engine.runner.executor.cache.layout
    WireGate(PcaLutWire(layout, table), RawWire(layout))


def test_more_bits_are_closer(config: KVCalibrateConfig) -> None:
    found = [
        calibrate(replace(config, bits=bits, output=config.output.with_name(f"{bits}.safetensors")))
        for bits in (2.0, 6.0)
    ]
    assert found[1].kl < 0.3 * found[0].kl
    assert found[1].nats < 0.1 * found[0].nats


def test_variance_keeps_as_many_components_as_it_says(config: KVCalibrateConfig) -> None:
    by_variance = replace(config, variance=0.9, weighting="variance", bits=8.0)
    report = calibrate(by_variance)
    table = KVTable.load(config.output)
    kept = table.bits > 0
    variance = table.spread.double() ** 2
    share = (variance * kept).sum(-1) / variance.sum(-1)
    assert (share >= 0.9).all()
    assert report.components == int(kept.sum()) < kept.numel()


def test_what_exists_is_kept_unless_told(config: KVCalibrateConfig) -> None:
    config.output.write_text("precious")
    with pytest.raises(ConfigError, match="output exists"):
        calibrate(config)
    assert config.output.read_text() == "precious"
    calibrate(replace(config, overwrite=True))
    KVTable.load(config.output)


def test_a_table_that_is_too_far_off_is_not_written(config: KVCalibrateConfig) -> None:
    with pytest.raises(QualityError, match="allowed are 1e-09"):
        calibrate(replace(config, max_kl=1e-9))
    assert not config.output.exists()


def test_several_files_and_recorded_traffic(config: KVCalibrateConfig, tmp_path: Path) -> None:
    traffic = tmp_path / "traffic.jsonl"
    lines = [
        {"token_ids": list(range(3, 60))},
        {"messages": [{"role": "user", "content": words(40)}]},
        {"text": words(900)},
    ]
    traffic.write_text("\n".join(map(json.dumps, lines)))
    report = calibrate(replace(config, text=(*config.text, traffic)))
    assert report.tokens == 30 * (32 - 2)


def test_a_text_that_leaves_nothing_to_measure_on_is_refused(config: KVCalibrateConfig, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(words(970))
    with pytest.raises(ConfigError, match="10 tokens of the text are left to measure on, 48 are needed"):
        calibrate(replace(config, text=(short,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 0.0}, "bits must be above 0"),
        ({"bits": 9.0}, "at most 8"),
        ({"variance": 1.5}, "variance must be"),
        ({"gradient_samples": 0}, "needs gradients"),
        ({"text": ()}, "no text"),
        ({"exact_last": -1}, "exact_last must be at least 0"),
        ({"length": 8}, "length must be at least"),
    ],
)
def test_options_that_cannot_be_are_refused(
    config: KVCalibrateConfig, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, **changes)  # type: ignore[arg-type]


def test_the_same_seed_makes_the_same_table(config: KVCalibrateConfig) -> None:
    files = [config.output.with_name(name) for name in ("a", "b", "c")]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        calibrate(replace(config, output=file, seed=seed))
    prints = [KVTable.load(file).fingerprint() for file in files]
    assert prints[0] == prints[1] != prints[2]


def test_the_command_prints_its_report(config: KVCalibrateConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kv-calibrate", config.model, "--text", str(config.text[0]), "--output", str(config.output), "--json"]
    small = [
        "--samples=10",
        "--length=32",
        "--gradient-samples=2",
        "--exact-last=4",
        "--eval-tokens=100",
        "--threads=1",
    ]
    assert cli.main([*arguments, *small]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["table"] == str(config.output)
    assert report["kl"] >= 0
    assert torch.isfinite(KVTable.load(config.output).basis).all()
