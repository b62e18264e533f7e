"""Tensors read in pieces by threads: what is read is what is stored, in whatever order; kernels that are kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triblade.errors import CheckpointError
from triblade.models import device_tensors
from triblade.models.safetensors_checkpoint import SafetensorsCheckpoint
from triblade.ops.cuda.device import _keep, _kept

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tensors of several types, larger and smaller than a piece, one of them empty."""
    monkeypatch.setattr(device_tensors, "PIECE_BYTES", 1000)
    monkeypatch.setattr(device_tensors, "AHEAD_BYTES", 5000)
    tensors = {
        f"model.layers.{n}.mlp.{name}.weight": torch.randn(20, 30 + n) for n in range(4) for name in ("up", "down")
    }
    tensors["model.embed_tokens.weight"] = torch.randn(50, 30).bfloat16()
    tensors["model.layers.1.weight_shape"] = torch.tensor([3, 4])
    tensors["model.layers.2.packed"] = torch.randint(-5, 5, (7, 9), dtype=torch.int32)
    tensors["nothing"] = torch.zeros(0, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


def test_every_tensor_in_any_order(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    names = sorted(checkpoint.names())
    stored = {name: checkpoint.tensor(name) for name in names}
    for order in (names, names[::-1], names[3:] + names[:3], [*names, *names]):
        checkpoint.load_to(CPU)
        for name in order:
            found = checkpoint.tensor(name)
            assert found.dtype == stored[name].dtype
            assert torch.equal(found, stored[name]), name
        checkpoint.release()
    assert torch.equal(checkpoint.tensor(names[0]), stored[names[0]])


def test_a_file_that_became_shorter(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9000])
    checkpoint.load_to(CPU)
    last = max(checkpoint.names(), key=lambda name: checkpoint.info(name).offset)
    with pytest.raises(CheckpointError, match="ends too early"):
        checkpoint.tensor(last)
    checkpoint.load_to(None)


def test_a_consumer_that_stops_early_leaves_no_thread(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    checkpoint.load_to(CPU)
    checkpoint.tensor("model.embed_tokens.weight")
    reading = checkpoint._on_device
    assert reading is not None
    checkpoint.release()
    assert not reading._files
    assert all(not thread.is_alive() for thread in reading._threads._threads)


def test_compiled_kernels_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    path, code = tmp_path / "kernels" / "linear.cubin", b"\x7fELF" + bytes(range(200))
    assert _kept(path) is None
    assert _keep(path, code) == code
    assert _kept(path) == code
    assert [file.name for file in path.parent.iterdir()] == ["linear.cubin"]
    path.write_bytes(path.read_bytes()[:-1])
    assert _kept(path) is None
    (tmp_path / "file").write_bytes(b"")
    assert _keep(tmp_path / "file" / "below", code) == code  # a folder that cannot be made
