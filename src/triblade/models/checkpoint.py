"""A model's weights and configuration on disk, whatever the format: names with tensors, in Hugging Face's spelling.

Knows no decoder. Formats are one file each (`safetensors_checkpoint`, `gguf_checkpoint`); after `open_checkpoint`
nobody can tell them apart. Opening reads headers only and fails if anything that they promise is not there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from triblade.errors import CheckpointError, UnsupportedError
from triblade.registry import CHECKPOINT_FORMATS

if TYPE_CHECKING:
    from triblade.models.safetensors_checkpoint import SafetensorsCheckpoint

_SAMPLE_BYTES = 16 * 1024


class Checkpoint(Protocol):
    """What a loader can ask of a model on disk."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration in the form of config.json."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Generation defaults in the form of generation_config.json; may be empty."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type to compute in: that of the weights in the file; bfloat16 for a GGUF file and where codes have float16 scales."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors as they will be in memory in `dtype`."""
        ...

    def names(self) -> frozenset[str]:
        """Names of all tensors, as transformers spells them."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, in the layout and conventions of transformers.

        Raises:
            CheckpointError: there is no tensor of that name.
        """
        ...

    def release(self) -> None:
        """Let go of the memory that reading took; tensors can be read again."""
        ...

    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 that is the same for copies of a checkpoint and differs when its content differs."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model folder, or GGUF file, at `path`.

    Raises:
        CheckpointError: something that the headers promise is missing or corrupt.
        UnsupportedError: the format is understood, but not read.
    """
    if path.is_dir():
        from triblade.models.safetensors_checkpoint import SafetensorsCheckpoint

        folder = SafetensorsCheckpoint(path)
        return _quantized(folder) if folder.quantization else folder
    if path.is_file():  # its package need not be installed for other models
        from triblade.models.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise CheckpointError(f"no such file or folder: {path}")


def _quantized(folder: SafetensorsCheckpoint) -> Checkpoint:
    """The checkpoint as its format reads it. Formats are further right than this package, so the registry has them."""
    method = str(folder.quantization.get("quant_method"))
    if method not in CHECKPOINT_FORMATS:
        raise UnsupportedError(
            f"the weights are quantized with {method!r}, which is not read",
            hint=f"read: {', '.join(CHECKPOINT_FORMATS)}, and GGUF files; or use the model's unquantized weights",
        )
    opened: Checkpoint = CHECKPOINT_FORMATS[method]().open(folder)
    return opened


def unknown_tensor(name: str, path: Path) -> CheckpointError:
    """The error for a tensor that a checkpoint does not have."""
    return CheckpointError(f"no tensor {name!r} in {path}")


def digest(config: Mapping[str, Any], chunks: Iterable[bytes]) -> str:
    """SHA-256 over a configuration and the chunks that stand for the weights."""
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for chunk in chunks:
        total.update(len(chunk).to_bytes(8, "little"))
        total.update(chunk)
    return total.hexdigest()


def sample_spans(begin: int, size: int) -> list[tuple[int, int]]:
    """(offset, length) of the bytes that stand for a tensor in a fingerprint: all, or three pieces of a large one."""
    if size <= 3 * _SAMPLE_BYTES:
        return [(begin, size)]
    middle, end = begin + size // 2, begin + size - _SAMPLE_BYTES
    return [(offset, _SAMPLE_BYTES) for offset in (begin, middle, end)]
