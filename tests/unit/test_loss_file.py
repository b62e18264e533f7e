"""Estimated losses on disk: equal when read again, never taken for another model's, never half a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triblade.errors import CheckpointError, ConfigError
from triblade.quant.loss_file import load_losses, save_losses
from triblade.quant.scheme import QuantScheme

FOUR = QuantScheme(bits=4, group_size=32, symmetric=False)
EIGHT = QuantScheme(bits=8, group_size=None, symmetric=True)
LOSSES = [{"qkv": {FOUR: 1 / 3, EIGHT: 1e-7}}, {"qkv": {FOUR: 0.0, EIGHT: 2.5}}]
MADE_FROM = {"model": "m", "calibration": "c", "dtype": "torch.float32"}


def test_losses_come_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "losses.json"
    save_losses(path, LOSSES, MADE_FROM)
    assert load_losses(path, [FOUR, EIGHT], MADE_FROM) == LOSSES
    assert [file.name for file in path.parent.iterdir()] == ["losses.json"]


def test_only_what_is_asked_for_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    assert load_losses(path, [FOUR], MADE_FROM) is None
    save_losses(path, LOSSES, MADE_FROM)
    assert load_losses(path, [FOUR], MADE_FROM) == [{"qkv": {FOUR: 1 / 3}}, {"qkv": {FOUR: 0.0}}]
    three = QuantScheme(bits=3, group_size=32, symmetric=False)
    assert load_losses(path, [FOUR, three], MADE_FROM) is None


def test_losses_of_another_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    save_losses(path, LOSSES, MADE_FROM)
    with pytest.raises(ConfigError, match="another model, text or type"):
        load_losses(path, [FOUR], {**MADE_FROM, "calibration": "other"})


@pytest.mark.parametrize("damage", ["layers", "bits", "loss", "nan", "json"])
def test_a_damaged_file_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    save_losses(path, LOSSES, MADE_FROM)
    content = json.loads(path.read_text())
    entry = content["layers"][0]["qkv"][0]
    if damage == "layers":
        content["layers"] = 3
    elif damage == "bits":
        entry["bits"] = 5
    elif damage == "loss":
        del entry["loss"]
    else:
        entry["loss"] = float("nan")
    path.write_text("{" if damage == "json" else json.dumps(content))
    with pytest.raises(CheckpointError, match=r"losses\.json"):
        load_losses(path, [FOUR], MADE_FROM)
