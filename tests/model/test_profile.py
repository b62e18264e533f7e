"""The measured profile of this machine: plausible, kept, and measured again where the file is of no use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from triblade.bench.cores import Cores
from triblade.tune import profile
from triblade.tune.hardware import Hardware


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.001)
    monkeypatch.setattr(profile, "BYTES", 2**20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Cores, "others", lambda *_: 0.0)


def test_it_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    found = profile.this_machine(tmp_path)
    assert (found.kind, found.label) == ("cpu", "measured")
    assert min(found.bandwidth_gb_s, found.int8, found.float16, found.memory_gb) > 0
    assert torch.get_num_threads() == threads
    monkeypatch.setattr(profile, "_cpu", lambda _: pytest.fail("measured again"))
    again = profile.this_machine(tmp_path)
    assert again.bandwidth_gb_s == found.bandwidth_gb_s


def test_what_was_measured_on_a_busy_machine_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Cores, "others", lambda *_: 1.0)
    monkeypatch.setattr(profile.psutil, "cpu_count", lambda: 2)
    assert profile.this_machine(tmp_path).bandwidth_gb_s > 0
    assert not (tmp_path / profile.PROFILE).exists()
    assert "1.0 cores busy" in caplog.text


@pytest.mark.parametrize("damage", ["{", '{"machine": []}', '{"machine": null, "profile": {}}'])
def test_a_file_of_no_use_is_replaced(tmp_path: Path, damage: str) -> None:
    path = tmp_path / profile.PROFILE
    path.write_text(damage, encoding="utf-8")
    found = profile.this_machine(tmp_path)
    assert isinstance(found, Hardware)
    assert json.loads(path.read_text(encoding="utf-8"))["profile"]["name"] == found.name


def test_without_native_kernels_torch_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "native_module", lambda: None)
    found = profile.this_machine(tmp_path)
    assert found.int8 == found.float16
    assert "torch" in found.source
