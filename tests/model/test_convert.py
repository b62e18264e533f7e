"""From a folder to a quantized folder: complete, resumable to the bit, refused early, measured, gated."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interruption import interrupt
from safetensors.torch import load_file, save_file
from tiny_folders import tiny_folder, words

from triblade import cli
from triblade.config import ConvertConfig, EngineConfig
from triblade.errors import (
    CheckpointError,
    ConfigError,
    MemoryBudgetError,
    NumericalError,
    QualityError,
    TribladeError,
    UnsupportedError,
)
from triblade.host import Memory
from triblade.models.loader import open_model
from triblade.ops.reference import ReferenceBackend
from triblade.quant.convert import convert
from triblade.quant.quality import perplexity


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(words(3000))
    return path


@pytest.fixture
def config(model: Path, text: Path, tmp_path: Path) -> ConvertConfig:
    return ConvertConfig(
        model=str(model),
        output=tmp_path / "out",
        group_size=32,
        calibration=str(text),
        calibration_samples=40,
        calibration_length=32,
        threads=1,
    )


def files(folder: Path) -> dict[str, bytes]:
    """Everything but the report, which has times in it."""
    skipped = ("triblade.json", "quantization_report.html")
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name not in skipped}


def ppl(folder: Path, ids: torch.Tensor) -> float:
    opened = open_model(EngineConfig(model=str(folder)))
    return perplexity(opened.load(32, ReferenceBackend(), torch.device("cpu")), ids, 32).value


def test_a_checkpoint_is_written_measured_and_read_again(config: ConvertConfig, model: Path) -> None:
    report = convert(config)
    assert report.quality is not None
    assert report.quality["kl"] > 0
    assert report.quality["num_tokens"] > 1000
    assert report.bytes_after == sum(
        p.stat().st_size for p in config.output.iterdir()
    )  # B18: what is reported is there
    assert report.average_bits == pytest.approx(4 + 20 / 32)
    saved = json.loads((config.output / "triblade.json").read_text())
    assert saved["method"] == "balance+correct+gptq+refine"
    assert len(saved["layers"]) == 3
    assert {"q_proj", "down_proj"} < set(saved["layers"][0]["schemes"])
    page = (config.output / "quantization_report.html").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page
    ids = torch.randint(3, 96, (512,), generator=torch.Generator().manual_seed(9))
    assert ppl(config.output, ids) == pytest.approx(ppl(model, ids), rel=0.2)
    assert not config.output.with_name("out.unfinished").exists()
    tensors = load_file(config.output / "model.safetensors")
    assert "lm_head.weight" not in tensors  # B22: tied stays tied
    assert json.loads((config.output / "config.json").read_text())["tie_word_embeddings"] is True
    original = load_file(model / "model.safetensors")
    assert torch.equal(tensors["model.embed_tokens.weight"], original["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("awq", {}),
        ("awq", {"symmetric": True}),
        ("gptq", {"symmetric": True}),
        ("gptq", {"symmetric": True, "bits": 8, "group_size": -1}),
        ("compressed-tensors", {"bits": 2}),
        ("compressed-tensors", {"bits": 3, "group_size": -1}),
        ("compressed-tensors", {"bits": 8, "symmetric": True}),
        ("compressed-tensors", {"quantization": "int8"}),
        ("compressed-tensors", {"quantization": "rtn", "calibration": None}),
        ("compressed-tensors", {"rules": ("self_attn=8", "re:layers.0.mlp=dense")}),
    ],
)
def test_every_format_loads_again(layout: Any, options: dict[str, Any], config: ConvertConfig, model: Path) -> None:
    """B16, B24: the matrix of bits and formats; what was measured before writing is what the files hold."""
    report = convert(replace(config, format=layout, **options))
    ids = open_model(EngineConfig(model=str(model))).tokenizer.encode(words(3000))[1280:]
    found = ppl(config.output, torch.tensor(ids[:512]))
    assert math.isfinite(found)
    if report.quality is not None:
        original = ppl(model, torch.tensor(ids[:512]))
        assert (
            abs(math.log(found / original))
            < 0.05
            + 2 * abs(math.log(report.quality["perplexity"] / report.quality["original_perplexity"]))
            + report.quality["kl"]
        )


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_resuming_gives_the_same_bits(
    layers: int, config: ConvertConfig, monkeypatch: pytest.MonkeyPatch
) -> None:  # B26
    whole = replace(config, output=config.output.with_name("whole"))
    convert(whole)
    interrupt(config, layers, monkeypatch)
    assert not config.output.exists()
    with pytest.raises(ConfigError, match=f"unfinished run of {layers} layers"):
        convert(config)
    convert(replace(config, resume=True))
    assert files(config.output) == files(whole.output)


def test_kill_9_and_resume(config: ConvertConfig, tmp_path: Path) -> None:  # B26
    """A process that is killed by the system, not by an exception."""
    program = (
        "import os, signal, sys\n"
        "from triblade.quant.run_state import RunState\n"
        "from triblade.cli import main\n"
        "finish = RunState.finish_layer\n"
        "def die(state, *rest):\n"
        "    finish(state, *rest)\n"
        "    if len(state.layers) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "RunState.finish_layer = die\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = ["convert", config.model, "--output", str(config.output), "--group-size", "32", "--threads", "1"]
    flags += ["--calibration", str(config.calibration), "--calibration-samples", "40", "--calibration-length", "32"]
    died = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL
    assert not config.output.exists()
    assert cli.main([*flags, "--resume"]) == 0
    whole = replace(config, output=tmp_path / "whole")
    convert(whole)
    assert files(config.output) == files(whole.output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits was 4, now 3"),
        ({"quantization": "gptq"}, "quantization was best, now gptq"),
        ({"calibration_samples": 39}, "the calibration changed"),
    ],
)
def test_another_run_is_not_continued(
    change: dict[str, Any], message: str, config: ConvertConfig, monkeypatch: pytest.MonkeyPatch
) -> None:  # B26
    interrupt(config, 1, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        convert(replace(config, resume=True, **change))


def test_another_model_is_not_continued(
    config: ConvertConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # B26
    interrupt(config, 1, monkeypatch)
    other = tiny_folder(tmp_path / "other", seed=1, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="the model changed"):
        convert(replace(config, model=str(other), resume=True))


def test_damaged_state_is_noticed(config: ConvertConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(config, 1, monkeypatch)
    streams = next(config.output.with_name("out.unfinished").glob("streams-*.bin"))
    streams.write_bytes(streams.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match="not complete"):
        convert(replace(config, resume=True))


def test_a_damaged_layer_is_noticed(config: ConvertConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(config, 1, monkeypatch)
    layer = next(config.output.with_name("out.unfinished").glob("*.safetensors"))
    layer.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="cannot read"):
        convert(replace(config, resume=True))


# Preflight: nothing has been computed when these are raised.


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("the run has begun")

    monkeypatch.setattr("triblade.quant.convert.quantize_layers", fail)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"group_size": 128},
            ConfigError,
            r"128 does not divide the rows of q_proj, .*\(64 inputs\)(.|\n)*--group-size 32",
        ),
        ({"group_size": 64}, ConfigError, r"64 does not divide the rows of down_proj \(96 inputs\)"),
        ({"bits": 5}, UnsupportedError, "5 bits"),
        ({"format": "awq", "bits": 3}, UnsupportedError, "AWQ holds 4-bit weights only"),
        ({"calibration": None}, ConfigError, "needs calibration text"),
        ({"calibration": "/nowhere.txt"}, ConfigError, "cannot read the calibration text: /nowhere.txt"),
        ({"rules": ("selfattn=8",)}, ConfigError, "fits no module: 'selfattn=8'"),
        ({"rules": ("o_proj=4x",)}, ConfigError, "not a scheme: '4x'"),
        ({"rules": ("o_proj",)}, ConfigError, "not a rule"),
        ({"quantization": "gtpq"}, ConfigError, "did you mean 'gptq'"),
        ({"max_kl": 0.1, "calibration_samples": 93}, ConfigError, "a gate needs text"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    change: dict[str, Any], error: type[TribladeError], message: str, config: ConvertConfig
) -> None:  # B11
    with pytest.raises(error, match=message):
        convert(replace(config, **change))
    assert not config.output.exists()
    assert not config.output.with_name("out.unfinished").exists()


def test_asymmetric_gptq_is_refused(config: ConvertConfig) -> None:
    with pytest.raises(UnsupportedError, match="zero points of their own"):
        replace(config, format="gptq")


@pytest.mark.usefixtures("no_work")
def test_too_little_memory_is_refused_at_once(config: ConvertConfig, monkeypatch: pytest.MonkeyPatch) -> None:  # B27
    monkeypatch.setattr("triblade.quant.preflight.host.memory", lambda: Memory(2**30, 2**20))
    with pytest.raises(MemoryBudgetError, match="1,048,576 are free"):
        convert(config)


@pytest.mark.usefixtures("no_work")
def test_too_little_disk_is_refused_at_once(config: ConvertConfig, monkeypatch: pytest.MonkeyPatch) -> None:  # B29
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("triblade.quant.preflight.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(CheckpointError, match="has 1,000"):
        convert(config)


def test_hidden_states_go_to_files_where_memory_is_short(
    config: ConvertConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(config, output=config.output.with_name("whole"))
    convert(whole)
    monkeypatch.setattr("triblade.quant.preflight.STREAMS_SHARE", 0.0)
    convert(config)
    assert files(config.output) == files(whole.output)


@pytest.mark.usefixtures("no_work")
def test_weights_that_are_not_finite_are_named(config: ConvertConfig, model: Path, tmp_path: Path) -> None:  # B01
    broken = tiny_folder(tmp_path / "broken", tie_word_embeddings=True)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = math.nan
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(NumericalError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 values"):
        convert(replace(config, model=str(broken)))


@pytest.mark.usefixtures("no_work")
def test_a_missing_tokenizer_is_noticed_before_any_work(config: ConvertConfig, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        convert(replace(config, model=str(folder)))


def test_an_output_that_exists_is_kept(config: ConvertConfig) -> None:
    config.output.mkdir()
    (config.output / "precious").write_text("x")
    with pytest.raises(ConfigError, match="the output exists"):
        convert(config)
    assert (config.output / "precious").read_text() == "x"


# Gate.


def test_a_failed_gate_writes_nothing_and_names_causes(config: ConvertConfig) -> None:
    strict = replace(config, bits=2, max_kl=1e-6, max_ppl_increase=0.0)
    with pytest.raises(QualityError, match=r"KL .* exceeds 1e-06") as error:
        convert(strict)
    assert "few bits" in str(error.value)
    assert "little calibration text" in str(error.value)
    assert not config.output.exists()
    convert(replace(strict, max_kl=None, max_ppl_increase=None, resume=True))
    assert (config.output / "config.json").is_file()


def test_traffic_unlike_the_calibration_is_reported(
    config: ConvertConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traffic = tmp_path / "traffic.txt"
    traffic.write_text(words(2000, low=80))
    report = convert(replace(config, quantization="rtn", traffic=traffic))
    assert report.drift is not None
    assert report.drift["score"] > 0.3


def test_rules_obey_fused_products(config: ConvertConfig) -> None:  # B25
    convert(replace(config, rules=("q_proj=8", "gate_proj=dense")))
    schemes = json.loads((config.output / "triblade.json").read_text())["layers"][1]["schemes"]
    assert schemes == {
        "q_proj": "W8 g32 asym",
        "k_proj": "W8 g32 asym",
        "v_proj": "W8 g32 asym",
        "o_proj": "W4 g32 asym",
        "down_proj": "W4 g32 asym",
    }
    tensors = load_file(config.output / "model.safetensors")
    assert {"model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"} <= set(tensors)


def test_the_model_writes_its_own_text(config: ConvertConfig, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["convert", config.model, "--output", str(config.output), "--group-size", "32", "--threads", "1"]
    flags += ["--calibration", "self", "--calibration-samples", "40", "--calibration-length", "24", "--json"]
    assert cli.main(flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calibration"]["used_tokens"] == 40 * 24
    assert os.listdir(config.output.parent) == ["out"] or (config.output / "config.json").is_file()


@pytest.mark.parametrize("bits", [5.2, 3.9])
def test_a_budget_of_bits_is_spent_and_kept(bits: float, config: ConvertConfig) -> None:
    report = convert(replace(config, average_bits=bits))
    assert bits - 0.5 < report.average_bits <= bits
    schemes = [set(layer["schemes"].values()) for layer in report.layers]
    assert len(set().union(*schemes)) > 1
    for layer in report.layers:  # B25
        assert len({layer["schemes"][name] for name in ("q_proj", "k_proj", "v_proj")}) == 1
        assert len({layer["schemes"][name] for name in ("gate_proj", "up_proj")}) == 1


def test_a_budget_of_bytes_is_spent_and_kept(config: ConvertConfig, tmp_path: Path) -> None:
    cheap, dear = (convert(replace(config, bits=bits, output=tmp_path / str(bits))) for bits in (4, 8))
    sizes = [os.path.getsize(Path(report.output) / "model.safetensors") for report in (cheap, dear)]
    budget = sum(sizes) / 2
    report = convert(replace(config, max_size_mb=budget / 1e6))
    written = os.path.getsize(config.output / "model.safetensors")
    assert sizes[0] < written <= budget
    assert cheap.average_bits < report.average_bits < dear.average_bits


def test_a_second_budget_estimates_nothing(
    config: ConvertConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = replace(config, average_bits=5.2, sensitivity=tmp_path / "losses.json")
    first = convert(budget)
    monkeypatch.delattr("triblade.quant.convert_inputs.estimate_losses")
    again = convert(replace(budget, output=tmp_path / "again"))
    assert files(config.output) == files(tmp_path / "again")
    more = convert(replace(budget, output=tmp_path / "more", average_bits=6.5))
    assert again.average_bits == first.average_bits < more.average_bits <= 6.5
    with pytest.raises(ConfigError, match="another model, text"):
        convert(replace(budget, output=tmp_path / "other", calibration_samples=20))


@pytest.mark.usefixtures("no_work")
def test_a_budget_below_the_cheapest_scheme_is_refused(config: ConvertConfig) -> None:
    with pytest.raises(ConfigError, match="at least 3"):
        convert(replace(config, average_bits=2.0))
    with pytest.raises(ConfigError, match="leave rules"):
        replace(config, average_bits=4.5, rules=("o_proj=8",))
    with pytest.raises(ConfigError, match="at least 3"):
        convert(replace(config, max_size_mb=0.01))
    with pytest.raises(ConfigError, match="leave one"):
        replace(config, average_bits=4.5, max_size_mb=100.0)
    with pytest.raises(UnsupportedError, match="awq checkpoints have one scheme"):
        replace(config, average_bits=4.5, format="awq")


def test_eval_reports_repetition(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["eval", str(model), "--text", str(text), "--context", "32", "--max-tokens", "64", "--against", str(model)]
    flags += ["--generations", "3", "--generation-tokens", "40", "--threads", "1", "--json", "--device", "cpu"]
    assert cli.main(flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0 <= report["repetition_rate"] <= 1
    assert report["against_repetition_rate"] == report["repetition_rate"]
