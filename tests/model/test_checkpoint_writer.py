"""Checkpoints on disk: complete and equal to what was given, or not there at all."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import random_matrix, same
from safetensors.torch import load_file
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError, UnsupportedError
from triblade.models.checkpoint import open_checkpoint
from triblade.quant import checkpoint_writer, shard_writer
from triblade.quant.checkpoint_writer import CheckpointWriter, Export, Part, write_checkpoint
from triblade.quant.companions import companion_files
from triblade.quant.quantized_checkpoint import QuantizedCheckpoint
from triblade.quant.scheme import IntegerMatrix, QuantScheme
from triblade.quant.shard_writer import ShardWriter
from triblade.registry import CHECKPOINT_FORMATS

W4 = QuantScheme(bits=4, group_size=64, symmetric=False)
CONFIG = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "tie_word_embeddings": True}
FILES = {"tokenizer.json": b'{"a": "\xc3\xa4"}', "additional_chat_templates/tools.jinja": b"{{ x }}\r\n"}


def parts(scheme: QuantScheme = W4, dtype: torch.dtype = torch.float16) -> dict[str, Part]:
    matrix = random_matrix(64, 128, scheme, dtype)
    bias = IntegerMatrix(
        codes=matrix.codes,
        scales=matrix.scales,
        zero_points=matrix.zero_points,
        scheme=scheme,
        bias=torch.arange(64).half(),
    )
    return {
        "model.embed_tokens.weight": torch.arange(96, dtype=torch.bfloat16).reshape(3, 32),
        "model.layers.0.self_attn.q_proj": bias,
        "model.layers.0.mlp.up_proj": matrix,
        "model.layers.0.mlp.down_proj.weight": torch.ones(5, 3, dtype=torch.bfloat16),
        "model.norm.weight": torch.full((3,), 2.0),
    }


def export(target: Path, layout: str = "compressed-tensors", **more: Any) -> Export:
    return Export(target=target, format=layout, config=CONFIG, companions=FILES, **more)


@pytest.mark.parametrize("layout", list(CHECKPOINT_FORMATS))
def test_everything_is_there_again(layout: str, tmp_path: Path) -> None:
    given = parts()
    written = write_checkpoint(export(tmp_path / "out", layout, report={"kl": 0.5}), given.items())
    assert written.path == tmp_path / "out"
    assert written.num_bytes == sum(path.stat().st_size for path in written.path.rglob("*") if path.is_file())  # B18
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    checkpoint = open_checkpoint(written.path)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    assert checkpoint.format == layout
    for name, part in given.items():
        if isinstance(part, Tensor):
            assert torch.equal(checkpoint.tensor(name), part)
            continue
        stored = checkpoint.matrix(name)
        assert stored is not None
        assert same(stored.matrix, part)
        assert torch.equal(checkpoint.tensor(f"{name}.weight"), part.dequantize())
    assert checkpoint.names() == {name if isinstance(p, Tensor) else f"{name}.weight" for name, p in given.items()} | {
        "model.layers.0.self_attn.q_proj.bias"
    }
    assert {name: (written.path / name).read_bytes() for name in FILES} == FILES
    assert json.loads((written.path / "triblade.json").read_text()) == {"kl": 0.5}
    config = json.loads((written.path / "config.json").read_text())
    assert {key: config[key] for key in CONFIG} == CONFIG


def test_what_stays_dense_is_named_in_the_configuration(tmp_path: Path) -> None:  # B22
    """Also a tied head, which has no tensor: it stays tied, and no reader of the class Linear takes it for quantized."""
    write_checkpoint(export(tmp_path / "out"), parts().items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_many_shards_read_as_one(tmp_path: Path) -> None:
    given = parts()
    write_checkpoint(export(tmp_path / "out", max_shard_bytes=3000), given.items())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / shard).values()) for shard in shards]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) == 64 * 128 // 2  # a tensor larger than a shard has one of its own
    assert len(index["weight_map"]) == 12


def test_odd_sizes_and_types_are_what_the_library_reads(tmp_path: Path) -> None:
    """No hole, no tensor at an address its type cannot have, none lost when headers are full."""
    tensors = {
        f"{dtype}.{count}".removeprefix("torch."): (torch.arange(count) % 2).to(dtype)
        for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float64)
        for count in (1, 2, 3, 8, 0)
    }
    tensors["scalar"] = torch.tensor(1.5)
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    writer = ShardWriter(tmp_path, header_bytes=1000)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_matrices_that_do_not_fit_the_format_are_named(tmp_path: Path) -> None:
    scheme = QuantScheme(bits=3, group_size=64, symmetric=True)
    with pytest.raises(UnsupportedError, match=r"q_proj: AWQ holds 4-bit weights only, not W3 g64 sym"):
        write_checkpoint(export(tmp_path / "out", "awq"), parts(scheme).items())
    with pytest.raises(UnsupportedError, match=r"GPTQ stores float16 scales"):
        write_checkpoint(export(tmp_path / "out", "gptq"), parts(dtype=torch.bfloat16).items())
    assert not list(tmp_path.iterdir())


# ---- targets


def test_a_taken_target_is_refused_before_anything(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    for overwrite in (False, True):  # what is no checkpoint is never replaced
        with pytest.raises(ConfigError, match="the output exists"):
            CheckpointWriter(export(tmp_path / "out", overwrite=overwrite))
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write_checkpoint(export(tmp_path / "out", report={"run": 1}), parts().items())
    with pytest.raises(ConfigError, match="the output exists"):
        write_checkpoint(export(tmp_path / "out"), parts().items())
    write_checkpoint(export(tmp_path / "out", overwrite=True), parts().items())
    assert not (tmp_path / "out" / "triblade.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_replacement_killed_half_way_is_undone(tmp_path: Path) -> None:
    write_checkpoint(export(tmp_path / "out", report={"run": 1}), parts().items())
    (tmp_path / "out").rename(tmp_path / ".out.old")
    with pytest.raises(ConfigError, match="the output exists"):
        CheckpointWriter(export(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "triblade.json").read_text()) == {"run": 1}


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_checkpoint(export(tmp_path / "out"), parts().items())
    open_checkpoint(tmp_path / "out")


def test_two_writers_of_one_target_do_not_meet(tmp_path: Path) -> None:
    with CheckpointWriter(export(tmp_path / "out")) as writer:
        with pytest.raises(ConfigError, match="another run is writing"):
            CheckpointWriter(export(tmp_path / "out"))
        for name, part in parts().items():
            writer.add(name, part)
        writer.finish()
    open_checkpoint(tmp_path / "out")


# ---- failures


def test_a_disk_that_is_too_small_is_refused_at_once(tmp_path: Path) -> None:  # B27
    with pytest.raises(CheckpointError, match=r"takes 10,000,000,000,000,000 bytes, the disk of .* has"):
        CheckpointWriter(export(tmp_path / "out", expected_bytes=10**16))
    assert not list(tmp_path.iterdir())


class FullDisk:
    """Every write fails from the given one on."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, tensor: Tensor) -> memoryview:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return memoryview(bytes(tensor.nbytes))


@pytest.mark.parametrize("room", [0, 4])
def test_a_full_disk_leaves_nothing(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # B29
    monkeypatch.setattr(shard_writer, "as_bytes", FullDisk(room))
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        write_checkpoint(export(tmp_path / "out", expected_bytes=12345), parts().items())
    assert "at least 12,345 bytes" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_at_the_last_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # B29
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "write_durably", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(export(tmp_path / "out"), parts().items())
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_quantizer_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Part]]:
        yield from list(parts().items())[:2]
        raise RuntimeError("layer 7")

    with pytest.raises(RuntimeError, match="layer 7"):
        write_checkpoint(export(tmp_path / "out"), broken())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "model.norm.weight"])
def test_what_reads_differently_is_no_success(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that is lost on the way to the disk."""
    write = shard_writer.as_bytes

    def damaged(tensor: Tensor) -> memoryview:
        content = bytearray(write(tensor))
        if tensor.nbytes in (64 * 128 // 2, 12):  # codes, the norm
            content[5] ^= 1
        return memoryview(content)

    given = {name: parts()[name], **{other: part for other, part in parts().items() if other != name}}
    monkeypatch.setattr(shard_writer, "as_bytes", damaged)
    with pytest.raises(CheckpointError, match=f"{name} read again from .* is not what was written"):
        write_checkpoint(export(tmp_path / "out"), given.items())
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time
sys.path[:0] = [{support!r}, {tests!r}]
from pathlib import Path
from test_checkpoint_writer import export, parts
from triblade.quant.checkpoint_writer import CheckpointWriter
with CheckpointWriter(export(Path({target!r}))) as writer:
    for name, part in parts().items():
        writer.add(name, part)
    print("written", flush=True)
    time.sleep(60)
"""


def test_a_kill_leaves_no_checkpoint_and_the_next_run_cleans_up(tmp_path: Path) -> None:  # B26, B16
    tests = Path(__file__).parent
    code = KILLED.format(support=str(tests.parent / "support"), tests=str(tests), target=str(tmp_path / "out"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    write_checkpoint(export(tmp_path / "out"), parts().items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert isinstance(open_checkpoint(tmp_path / "out"), QuantizedCheckpoint)


# ---- companions


def test_the_companions_of_a_folder_are_its_own_bytes(tmp_path: Path) -> None:
    write_checkpoint(export(tmp_path / "out"), parts().items())
    (tmp_path / "out" / "generation_config.json").write_bytes(b'{ "eos_token_id":2}')
    (tmp_path / "out" / "README.md").write_bytes(b"about the original")
    (tmp_path / "out" / "tokenizer_config.json").symlink_to(tmp_path / "out" / "tokenizer.json")
    files = companion_files(tmp_path / "out", open_checkpoint(tmp_path / "out"))
    assert files == {
        **FILES,
        "generation_config.json": b'{ "eos_token_id":2}',
        "tokenizer_config.json": FILES["tokenizer.json"],
    }
