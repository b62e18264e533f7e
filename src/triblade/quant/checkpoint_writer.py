"""A whole quantized checkpoint on disk, or none: tensors as they come, then configuration, tokenizer and report.

Everything goes into a hidden folder beside the target, is read again from there and compared with what was to be written, and takes
its name in the end. A full disk or a kill leaves nothing under that name; what a kill left behind the next run removes.
Knows no quantizer: parts are `IntegerMatrix` or plain tensors.

    with CheckpointWriter(export) as writer:
        for name, part in parts:
            writer.add(name, part)
        writer.finish()
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from triblade.errors import CheckpointError, ConfigError, UnsupportedError
from triblade.models.checkpoint import Checkpoint, open_checkpoint
from triblade.quant.formats.base import CheckpointFormat
from triblade.quant.quantized_checkpoint import QuantizedCheckpoint
from triblade.quant.scheme import IntegerMatrix, QuantScheme
from triblade.quant.shard_writer import MAX_SHARD_BYTES, ShardWriter, as_bytes, write_durably
from triblade.registry import CHECKPOINT_FORMATS

Part = IntegerMatrix | Tensor
HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What a checkpoint is besides its tensors."""

    target: Path
    format: str  # a name of CHECKPOINT_FORMATS
    config: Mapping[str, Any]  # config.json; its quantization_config is replaced
    companions: Mapping[str, bytes]  # tokenizer, templates, generation config: file name -> content
    report: Mapping[str, Any] | None = None  # triblade.json
    overwrite: bool = False  # replace a checkpoint that is there
    expected_bytes: int = 0  # refuse at once where the disk has less
    max_shard_bytes: int = MAX_SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A checkpoint that is complete, and was read again."""

    path: Path
    num_bytes: int  # of all its files


class CheckpointWriter:
    """Writes one checkpoint; a context in which nothing is left behind unless `finish` returned.

    Raises:
        ConfigError: from the constructor, when the target is taken.
        CheckpointError: the disk is full or fails, or what was read again is not what was written.
        UnsupportedError: a matrix does not fit the format.
    """

    def __init__(self, export: Export) -> None:
        self._export = export
        self._format: CheckpointFormat = CHECKPOINT_FORMATS[export.format]()
        self._target = export.target.resolve()
        self.folder = self._target.with_name(f".{self._target.name}.partial")
        self._schemes: dict[str, QuantScheme] = {}
        self._dense: list[str] = []
        self._digests: dict[str, bytes] = {}
        self._is_finished = False
        with self._explained():
            _restore(self._target)
            _refuse_taken(self._target, export.overwrite)
            self._target.parent.mkdir(parents=True, exist_ok=True)
            _refuse_small(self._target.parent, export.expected_bytes)
            self._lock = _claim(self.folder)
        self._shards = ShardWriter(self.folder, export.max_shard_bytes)

    def __enter__(self) -> CheckpointWriter:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was not finished."""
        if not self._is_finished:
            self._shards.abandon()
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def add(self, name: str, part: Part) -> None:
        """Write a quantized module by its name, or any other tensor by its own ("model.norm.weight")."""
        stored = self._stored(name, part)
        with self._explained():
            for tensor_name, tensor in stored.items():
                self._shards.add(tensor_name, tensor)
        self._digests[name] = _digest(part)
        if not isinstance(part, Tensor) and part.bias is not None:
            self._digests[f"{name}.bias"] = _digest(part.bias)

    def finish(self) -> Written:
        """Write the rest, compare, and give the checkpoint its name."""
        with self._explained():
            self._shards.close()
            for name, content in self._other_files().items():
                write_durably(self.folder / name, content)
            _sync_folder(self.folder)
        self._compare(open_checkpoint(self.folder))
        num_bytes = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        with self._explained():
            _rename(self.folder, self._target, self._export.overwrite)
        self._is_finished = True
        return Written(path=self._export.target, num_bytes=num_bytes)

    def _stored(self, name: str, part: Part) -> dict[str, Tensor]:
        if isinstance(part, Tensor):
            module = name.removesuffix(".weight")
            if part.ndim == 2 and module != name and not module.endswith("embed_tokens"):
                self._dense.append(module)
            return {name: part}
        reason = self._format.why_not(part.scheme, *part.codes.shape)
        if reason is not None:
            raise UnsupportedError(f"{name}: {reason}", hint="use compressed-tensors")
        self._schemes[name] = part.scheme
        bias = {} if part.bias is None else {f"{name}.bias": part.bias}
        return {f"{name}.{suffix}": tensor for suffix, tensor in self._format.tensors(part).items()} | bias

    def _other_files(self) -> dict[str, bytes]:
        """A head that is tied, or was left alone, is named as such: the class Linear would take it in."""
        dense = [*self._dense, *([] if HEAD in (*self._schemes, *self._dense) else [HEAD])]
        config = {
            **self._export.config,
            "quantization_config": self._format.quantization_config(self._schemes, dense),
        }
        files = {**self._export.companions, "config.json": _json(config)}
        return files if self._export.report is None else {**files, "triblade.json": _json(self._export.report)}

    def _compare(self, checkpoint: Checkpoint) -> None:
        """Read every part again through the reader that others' checkpoints go through."""
        for name, written in self._digests.items():
            if _digest(_read_part(checkpoint, name, is_module=name in self._schemes)) != written:
                raise CheckpointError(
                    f"{name} read again from {self.folder} is not what was written", hint="is the disk failing?"
                )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A failing disk as an error of ours."""
        try:
            yield
        except OSError as error:
            written = self._shards.num_bytes if hasattr(self, "_shards") else 0
            needed = max(self._export.expected_bytes, written)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise CheckpointError(
                f"cannot write {self._export.target}: {error.strerror or error}",
                hint=f"the checkpoint takes at least {needed:,} bytes; free some space" if full else None,
            ) from error


def write_checkpoint(export: Export, parts: Iterable[tuple[str, Part]]) -> Written:
    """Write a checkpoint from parts that may be made one by one; see `CheckpointWriter`."""
    with CheckpointWriter(export) as writer:
        for name, part in parts:
            writer.add(name, part)
        return writer.finish()


def _read_part(checkpoint: Checkpoint, name: str, *, is_module: bool) -> Part:
    if not is_module:
        return checkpoint.tensor(name)
    stored = checkpoint.matrix(name) if isinstance(checkpoint, QuantizedCheckpoint) else None
    if stored is None or stored.input_order is not None:
        raise CheckpointError(f"{name} is not quantized in what was written")
    return stored.matrix


def _digest(part: Part) -> bytes:
    """Of what a part means, less the bias: symmetric is the same as the middle for every zero point."""
    if isinstance(part, Tensor):
        return _sum(part)
    zeros = part.zero_points
    if zeros is None:
        zeros = torch.full(part.scales.shape, part.scheme.zero_point, dtype=torch.uint8)
    return _sum(part.codes, part.scales, zeros)


def _sum(*tensors: Tensor) -> bytes:
    total = hashlib.blake2b()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(as_bytes(tensor))
    return total.digest()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _refuse_taken(target: Path, overwrite: bool) -> None:
    """An empty folder is free; of what is there only a checkpoint may be replaced, and only when asked."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ConfigError(f"the output exists: {target}", hint="name another one, or pass --overwrite", param="output")
    if not (target / "config.json").is_file():
        raise ConfigError(f"the output exists and is no checkpoint: {target}", hint="name another one", param="output")


def _refuse_small(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"the checkpoint takes {needed:,} bytes, the disk of {folder} has {free:,}", hint="free some space"
        )


def _claim(folder: Path) -> int:
    """Make the folder, empty, for this process alone; a lock on it ends with the process. The descriptor that holds it."""
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(f"another run is writing {folder}", hint="wait for it, or name another output") from error
    for left in folder.iterdir():  # by a run that was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return lock


def _restore(target: Path) -> None:
    """Undo the first half of a replacement that was killed between its two renames."""
    old = _old(target)
    if old.exists() and not target.exists():
        old.rename(target)


def _rename(folder: Path, target: Path, overwrite: bool) -> None:
    if overwrite and target.exists():
        shutil.rmtree(_old(target), ignore_errors=True)
        target.rename(_old(target))
    folder.rename(target)
    _sync_folder(target.parent)
    shutil.rmtree(_old(target), ignore_errors=True)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _sync_folder(folder: Path) -> None:
    """Names are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
