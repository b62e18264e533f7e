"""`triblade doctor MODEL OPTIONS`: what would go wrong, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_folders import tiny_folder

from triblade import host
from triblade.cli import main
from triblade.config import EngineConfig
from triblade.doctor.configuration import examine
from triblade.engine import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def config(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", max_model_len=64, max_num_seqs=1, max_num_batched_tokens=8)


def needed(config: EngineConfig) -> int:
    """Bytes that the engine plans with."""
    import torch

    from triblade.models.loader import open_model

    return build.prepare(config, open_model(config), torch.device("cpu")).plan.total_bytes


def with_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(host, "memory", lambda: host.Memory(available, available))


def test_what_does_not_fit_is_named_with_a_change_that_does(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8 = needed(replace(config, kv_cache_dtype="int8"))
    assert int8 < needed(config)
    with_memory(monkeypatch, int(int8 / config.gpu_memory_utilization) + 4096)
    found = {finding.symptom: finding for finding in examine(config)}
    assert found["out of memory at load"].remedy == "this fits: --kv-cache-dtype=int8"


def test_where_nothing_fits_no_option_is_promised(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 1000)
    (finding,) = examine(config)
    assert finding.symptom == "out of memory at load"
    assert "smaller model" in finding.remedy


def test_what_the_memory_cuts(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(config, max_model_len=None)
    with_memory(monkeypatch, int((needed(whole) - 2048) / config.gpu_memory_utilization))
    found = {finding.symptom: finding for finding in examine(whole)}
    assert "tokens of KV cache" in found["crash on long text"].evidence


def test_reference_kernels_and_too_many_threads(config: EngineConfig) -> None:
    slow = [finding.cause for finding in examine(replace(config, backend="reference", threads=4096))]
    assert any("rules the fast kernels out" in cause for cause in slow)
    assert any("threads wait" in cause for cause in slow)


def test_the_command_says_so_and_fails(config: EngineConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", config.model, "--backend", "reference", "--max-model-len", "64"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("slow: the reference kernels would run this on cpu\n  cause: ")
    assert "\n  do: " in out
