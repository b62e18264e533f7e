"""Reading a model's shape without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triblade.errors import CheckpointError, ConfigError, ModelNotFoundError
from triblade.models.source import is_repository
from triblade.tune.open_shape import open_shape

HF: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
GROUPS = {"group_0": {"weights": {"num_bits": 4}}, "group_1": {"weights": {"num_bits": 8}}}


def folder(path: Path, **extra: Any) -> str:
    (path / "config.json").write_text(json.dumps({**HF, **extra}), encoding="utf-8")
    return str(path)


def test_config_json_is_enough(tmp_path: Path) -> None:
    shape = open_shape(folder(tmp_path))
    assert (shape.config.num_layers, shape.config.vocab_size) == (2, 1000)
    assert (shape.stored_bits, shape.has_head) == (16, False)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [({"quant_method": "awq", "bits": 4}, 4), ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, 8)],
)
def test_what_is_quantized_says_in_how_many_bits(tmp_path: Path, quantization: Any, bits: int) -> None:
    assert open_shape(folder(tmp_path, quantization_config=quantization)).stored_bits == bits


def test_bits_that_nobody_says_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp8"):
        open_shape(folder(tmp_path, quantization_config={"quant_method": "fp8"}))


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_shape(str(tmp_path))


def test_a_repository_is_asked_for_its_configuration_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder(tmp_path)
    monkeypatch.setattr("triblade.tune.open_shape.fetch_configuration", lambda _: tmp_path)
    assert open_shape("owner/name").name == "owner/name"
    assert is_repository("owner/name")
    assert not is_repository("owner/name:file.gguf")
    assert not is_repository(str(tmp_path))
    with pytest.raises(ModelNotFoundError):
        open_shape("nobody-knows-this")
