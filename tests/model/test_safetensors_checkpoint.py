"""Model folders: sharded and single, complete or refused, never a pickle."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from triblade.errors import CheckpointError, UnsupportedError
from triblade.models.checkpoint import open_checkpoint
from triblade.models.safetensors_checkpoint import SafetensorsCheckpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
TENSORS = {
    "model.embed_tokens.weight": torch.arange(32, dtype=torch.bfloat16).reshape(4, 8),
    "model.layers.0.mlp.up_proj.weight": torch.ones(3, 8, dtype=torch.bfloat16),
    "model.norm.weight": torch.full((8,), 2.0),
}
SHARDS = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")


def folder(path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A folder with one weight file."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(TENSORS if tensors is None else tensors, path / "model.safetensors")
    return path


def sharded(path: Path) -> Path:
    """A folder with one tensor in each of three shards."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = dict(zip(TENSORS, SHARDS, strict=True))
    for name, shard in weight_map.items():
        save_file({name: TENSORS[name]}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("make", [folder, sharded])
def test_reads_names_values_and_sizes(make: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path))
    assert checkpoint.names() == frozenset(TENSORS)
    for name, expected in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name), expected)
        assert checkpoint.tensor(name).dtype == expected.dtype
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {}
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.size_bytes == 2 * (32 + 24 + 8)
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.tensor("lm_head.weight")


def test_generation_config_is_read(tmp_path: Path) -> None:
    (folder(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert SafetensorsCheckpoint(tmp_path).generation_config == {"eos_token_id": [2, 7]}


def test_every_missing_shard_is_named(tmp_path: Path) -> None:  # A01
    sharded(tmp_path)
    for shard in (SHARDS[0], SHARDS[2]):
        (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]}, {SHARDS[2]}") as error:
        open_checkpoint(tmp_path)
    assert SHARDS[1] not in str(error.value)
    assert "download is incomplete" in str(error.value)


def test_a_missing_shard_is_found_before_anything_is_opened(tmp_path: Path) -> None:  # A01
    sharded(tmp_path)
    (tmp_path / SHARDS[0]).write_bytes(b"broken")
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        open_checkpoint(tmp_path)


def test_a_tensor_the_index_promises_must_be_in_its_shard(tmp_path: Path) -> None:  # A01
    sharded(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / SHARDS[1])
    with pytest.raises(CheckpointError, match=r"first: model\.layers\.0\.mlp\.up_proj\.weight .model-00002-of-00003"):
        open_checkpoint(tmp_path)


def test_where_two_shards_hold_a_name_the_index_decides(tmp_path: Path) -> None:
    sharded(tmp_path)
    stale = {"model.embed_tokens.weight": torch.zeros(4, 8), "model.norm.weight": TENSORS["model.norm.weight"]}
    save_file(stale, tmp_path / SHARDS[2])
    assert torch.equal(
        open_checkpoint(tmp_path).tensor("model.embed_tokens.weight"), TENSORS["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 7])
def test_an_index_cannot_point_outside_its_folder(file: object, tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": {}}', "{}"])
def test_a_broken_index_is_named(content: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_weight_file_cut_short_is_a_clean_error(keep: int, tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors") as error:
        open_checkpoint(tmp_path)
    assert "fetch it again" in str(error.value)


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}']
)
def test_a_corrupt_header_is_a_clean_error(header: bytes, tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="cannot read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_a_missing_or_broken_config_is_named(content: str | None, tmp_path: Path) -> None:
    path = folder(tmp_path) / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


class Payload:
    """Unpickling this creates the marker file named in the environment."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["MARKER"],))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "weights.pth"])
def test_pickles_are_refused_and_never_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # A14
    marker = tmp_path / "executed"
    monkeypatch.setenv("MARKER", str(marker))
    model = folder(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UnsupportedError, match=name) as error:
        open_checkpoint(model)
    assert "safetensors" in str(error.value)
    assert not marker.exists()
    pickle.loads((model / name).read_bytes())  # the payload does work
    assert marker.exists()


def test_safetensors_beside_a_pickle_are_read(tmp_path: Path) -> None:
    (folder(tmp_path) / "pytorch_model.bin").write_bytes(b"")
    assert open_checkpoint(tmp_path).names() == frozenset(TENSORS)


def test_a_folder_without_weights_says_what_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("config", [{"quant_method": "bitsandbytes"}, {"quant_method": "hqq"}, {"bits": 4}], ids=str)
def test_unknown_quantization_is_refused_by_method(config: Any, tmp_path: Path) -> None:
    """Not read as if the codes were weights. What is read is in contract/test_checkpoint_formats."""
    with pytest.raises(UnsupportedError, match=repr(config.get("quant_method"))) as error:
        open_checkpoint(folder(tmp_path, quantization_config=config))
    assert "compressed-tensors, awq, gptq" in str(error.value)


def test_a_quantization_config_of_its_own_file_is_found(tmp_path: Path) -> None:
    """As older GPTQ tools wrote it, without the method's name."""
    (folder(tmp_path) / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    with pytest.raises(CheckpointError, match="a GPTQ checkpoint must state bits, group_size and sym"):
        open_checkpoint(tmp_path)


def test_a_quantization_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config .* must be a JSON object, got: str"):
        open_checkpoint(folder(tmp_path, quantization_config="awq"))


@pytest.mark.parametrize(
    ("stored", "config", "expected"),
    [
        ((torch.float32,), {"dtype": "bfloat16"}, torch.float32),
        ((torch.float16, torch.float32), {}, torch.float16),  # by bytes: a large half, a small float
        ((torch.float64,), {}, torch.float32),
        ((torch.int8,), {"torch_dtype": "float16"}, torch.float16),
        ((torch.int8,), {}, torch.float32),
    ],
)
def test_dtype_is_what_most_of_the_file_has(stored: Any, config: Any, expected: torch.dtype, tmp_path: Path) -> None:
    tensors = {str(i): torch.ones(100 // (1 + 9 * i), dtype=dtype) for i, dtype in enumerate(stored)}
    assert open_checkpoint(folder(tmp_path, tensors, **config)).dtype == expected


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    first = open_checkpoint(folder(tmp_path / "a")).fingerprint()
    assert open_checkpoint(folder(tmp_path / "b")).fingerprint() == first
    changed = {**TENSORS, "model.norm.weight": TENSORS["model.norm.weight"] * 1.5}
    assert open_checkpoint(folder(tmp_path / "c", changed)).fingerprint() != first
    assert open_checkpoint(folder(tmp_path / "d", rope_theta=5)).fingerprint() != first
    renamed = {name.replace("norm", "form"): value for name, value in TENSORS.items()}
    assert open_checkpoint(folder(tmp_path / "e", renamed)).fingerprint() != first


def test_a_folder_is_opened_without_the_package_for_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an image for GPUs it need not be installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf" or "triblade.models.gguf" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).names() == {"model.norm.weight"}
