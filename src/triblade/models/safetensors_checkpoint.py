"""A Hugging Face model folder: config.json and safetensors weights, in one file or in shards with an index.

The index is a contract: every shard it names is there, and holds the tensors it is said to hold, before anything else
happens. Pickled weights are never opened. Knows no GGUF, no decoder, and of quantized weights only that they are.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from triblade.errors import CheckpointError, UnsupportedError
from triblade.models.checkpoint import digest, sample_spans, unknown_tensor
from triblade.models.device_tensors import DeviceTensors, StoredTensor
from triblade.models.json_files import read_json_object, read_json_object_if_present

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_BY_NAME = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CUT_SHORT = "the file is damaged or cut short; fetch it again"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor, from the header of its file."""

    file: str
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


class SafetensorsCheckpoint:
    """Implements `Checkpoint` for a folder; tensors are mapped from disk when asked for.

    Raises:
        CheckpointError: from the constructor, when a file is missing or broken.
        UnsupportedError: the weights are pickled.
    """

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    quantization: Mapping[str, Any]  # of packed weights, which only their format can read; empty: there are none

    def __init__(self, folder: Path) -> None:
        self.path = folder
        weight_map = _weight_map(folder)
        self.config = read_json_object(folder / "config.json")
        self.generation_config = read_json_object_if_present(folder / "generation_config.json")
        self.quantization = quantization_config(folder, self.config)
        files = sorted(set(weight_map.values())) or [_SINGLE]
        self._files = {file: _open(folder / file) for file in files}
        self._entries = _entries(folder, files, weight_map)
        self.dtype = _dtype(self._entries.values(), self.config)
        self._on_device: DeviceTensors | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors in `dtype`."""
        return sum(entry.num_elements for entry in self._entries.values()) * self.dtype.itemsize

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, mapped from its file, or on the device of `load_to`.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._entries:
            raise unknown_tensor(name, self.path)
        if self._on_device is not None and self._entries[name].num_bytes:
            return self._on_device.tensor(name)
        tensor: torch.Tensor = self._files[self._entries[name].file].get_tensor(name)
        return tensor

    def load_to(self, device: torch.device | None) -> None:
        """See `LoadsToDevice`."""
        if self._on_device is not None:
            self._on_device.close()
            self._on_device = None
        if device is None:
            return
        stored = {
            name: StoredTensor(self.path / e.file, e.offset, e.num_bytes, _TYPES[e.dtype], e.shape)
            for name, e in self._entries.items()
            if e.dtype in _TYPES
        }
        if len(stored) == len(self._entries):
            self._on_device = DeviceTensors(stored, device)

    def release(self) -> None:
        """Map the files anew, without the pages that were read."""
        self.load_to(None)
        self._files = {file: _open(self.path / file) for file in self._files}

    def info(self, name: str) -> TensorInfo:
        """Type and shape of a tensor as stored, and where it is.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._entries:
            raise unknown_tensor(name, self.path)
        return self._entries[name]

    def fingerprint(self) -> str:
        """SHA-256 over configuration, names, types, shapes and samples of every tensor's bytes."""
        return digest(self.config, self._samples())

    def _samples(self) -> Iterator[bytes]:
        entries = sorted(self._entries.items())
        spans = {name: sample_spans(entry.offset, entry.num_bytes) for name, entry in entries}
        with ExitStack() as stack:
            files = {name: stack.enter_context((self.path / name).open("rb")) for name in self._files}
            for name, entry in entries:
                _ask_for(files[entry.file].fileno(), spans[name])
            for name, entry in entries:
                yield f"{name} {entry.dtype} {entry.shape}".encode()
                for offset, length in spans[name]:
                    files[entry.file].seek(offset)
                    yield files[entry.file].read(length)


def _ask_for(file: int, spans: Iterable[tuple[int, int]]) -> None:
    """Have the system read pieces of a file meanwhile, where it can be asked: all together are much quicker than in turn."""
    if hasattr(os, "posix_fadvise"):
        for offset, length in spans:
            os.posix_fadvise(file, offset, length, os.POSIX_FADV_WILLNEED)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index; empty for a single file.

    Raises:
        CheckpointError: a shard of the index is not there, or there are no weights at all.
        UnsupportedError: there are only pickled weights.
    """
    if (folder / _SINGLE).is_file():
        return {}
    if not (folder / _INDEX).is_file():
        raise _no_weights(folder)
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / _INDEX} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{folder / _INDEX} names a file outside the folder: {file!r}")
    missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
    if missing:
        raise CheckpointError(
            f"weight files that the index names are missing in {folder}: {', '.join(missing)}",
            hint="the download is incomplete; fetch the model again",
        )
    return weight_map


def _no_weights(folder: Path) -> CheckpointError | UnsupportedError:
    pickled = sorted(
        path.name for pattern in _PICKLED for path in folder.glob(pattern) if path.name != "training_args.bin"
    )
    if pickled:
        return UnsupportedError(
            f"{folder} has pickled weights only; they can run code and are not opened: {', '.join(pickled[:3])}",
            hint="use a safetensors version of the model, or make one with transformers' save_pretrained",
        )
    return CheckpointError(f"no weights in {folder}: neither {_SINGLE} nor {_INDEX}", hint="fetch the model again")


def quantization_config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the weights are quantized, with a `quant_method`; empty: they are not.

    It is in config.json, or, by older tools, in a file of its own that need not name the method.

    Raises:
        CheckpointError: it is no JSON object.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None or found == {}:
        found = read_json_object_if_present(folder / "quantize_config.json")
        return {"quant_method": "gptq", **found} if found else {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"quantization_config in {folder} must be a JSON object, got: {type(found).__name__}")
    return found


def _open(path: Path) -> Any:
    """The library's own check of the header: lengths, offsets and types within the file."""
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", hint=_CUT_SHORT) from error


def _entries(folder: Path, files: list[str], weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
    """Name -> where it is. Where two files hold the same name the index decides."""
    headers = {file: _read_header(folder / file) for file in files}
    entries = {
        name: entry for file in files for name, entry in headers[file].items() if weight_map.get(name, file) == file
    }
    absent = sorted(name for name in weight_map if name not in entries)
    if absent:
        raise CheckpointError(
            f"{len(absent)} tensors that the index of {folder} promises are not in their files, first: {absent[0]} "
            f"({weight_map[absent[0]]})",
            hint="index and weight files are of different versions; fetch the model again",
        )
    return entries


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Layout: header length (u64), header (JSON: name -> dtype, shape, data_offsets), data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = {}
    for name, value in header.items():
        begin, end = value["data_offsets"]
        entries[name] = TensorInfo(path.name, value["dtype"], tuple(value["shape"]), 8 + length + begin, end - begin)
    return entries


def _dtype(entries: Iterable[TensorInfo], config: Mapping[str, Any]) -> torch.dtype:
    """The type that most of the bytes have; what config.json says if there are no floating-point tensors."""
    num_bytes: dict[str, int] = {}
    for entry in entries:
        num_bytes[entry.dtype] = num_bytes.get(entry.dtype, 0) + entry.num_bytes
    floats = {name: count for name, count in num_bytes.items() if name in _FLOATS}
    if floats:
        return _FLOATS[max(floats, key=floats.__getitem__)]
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return _BY_NAME.get(stated, torch.float32)
