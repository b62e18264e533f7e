"""Tensors of a safetensors folder straight onto a GPU: read in pieces by several threads into pinned memory, and on from there.

No tensor is ever whole in main memory. Reading runs ahead of whoever asks, in the order in which weights are asked for; a tensor
that was not expected next is read at once. Knows files and offsets, no model. Invariant: a piece is written to device memory only
after whatever used that memory before has run.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from triblade.errors import CheckpointError

PIECE_BYTES = 16 * 2**20
READERS = 8  # threads, each with one piece of pinned memory
AHEAD_BYTES = 768 * 2**20  # of tensors that nobody has asked for yet
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FIRST = re.compile(r"embed_tokens")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is."""

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@runtime_checkable
class LoadsToDevice(Protocol):
    """A checkpoint whose tensors can come on a device."""

    def load_to(self, device: torch.device | None) -> None:
        """From now on tensors come there; None: in main memory again."""
        ...


@dataclass(slots=True)
class _Coming:
    """A tensor on its way."""

    whole: Tensor  # uint8 on the device
    pieces: list[Future[None]]


class DeviceTensors:
    """Reads tensors onto a device.

    Args:
        stored: where they are, by name.
        device: a CUDA device; on others (tests) pieces are copied as they are.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], device: torch.device) -> None:
        self._stored = stored
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._next = deque(sorted(stored, key=lambda name: _place(name, stored[name])))
        self._coming: dict[str, _Coming] = {}
        self._taken: set[str] = set()
        self._ahead_bytes = 0
        self._files = {path: os.open(path, os.O_RDONLY) for path in {entry.path for entry in stored.values()}}
        self._threads = ThreadPoolExecutor(READERS, "weights")
        self._own = threading.local()

    def tensor(self, name: str) -> Tensor:
        """A tensor on the device; each is there for one call, then it is the caller's.

        Raises:
            CheckpointError: its file ended, or cannot be read.
        """
        entry = self._stored[name]
        coming = self._coming.pop(name, None)
        if coming is None:
            coming = self._start(entry)
        else:
            self._ahead_bytes -= entry.num_bytes
        self._taken.add(name)
        self._run_ahead()
        for piece in coming.pieces:
            piece.result()
        return coming.whole.view(entry.dtype).view(entry.shape)

    def close(self) -> None:
        """Stop reading."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._coming.clear()

    def _run_ahead(self) -> None:
        while self._next and self._ahead_bytes < AHEAD_BYTES:
            name = self._next.popleft()
            if name in self._taken or name in self._coming:
                continue
            self._coming[name] = self._start(self._stored[name])
            self._ahead_bytes += self._stored[name].num_bytes

    def _start(self, entry: StoredTensor) -> _Coming:
        whole = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self._device)
        free = None
        if self._is_cuda:
            free = torch.cuda.Event()
            free.record(torch.cuda.current_stream(self._device))
        starts = range(0, entry.num_bytes, PIECE_BYTES)
        pieces = [self._threads.submit(self._read, entry, at, whole[at : at + PIECE_BYTES], free) for at in starts]
        return _Coming(whole, pieces)

    def _read(self, entry: StoredTensor, at: int, target: Tensor, free: Any) -> None:
        """One piece, in a thread."""
        buffer, stream = self._staging()
        part = buffer[: len(target)]
        memory, done = part.numpy().data, 0
        while done < len(target):
            try:
                count = os.preadv(self._files[entry.path], [memory[done:]], entry.offset + at + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {entry.path}: {error}") from error
            if count == 0:
                raise CheckpointError(f"{entry.path} ends too early", hint="the file was cut short; fetch it again")
            done += count
        if stream is None:
            target.copy_(part)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(free)
            target.copy_(part, non_blocking=True)
        stream.synchronize()

    def _staging(self) -> tuple[Tensor, Any]:
        """This thread's pinned memory and stream."""
        if not hasattr(self._own, "parts"):
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda)
            self._own.parts = buffer, torch.cuda.Stream(self._device) if self._is_cuda else None
        parts: tuple[Tensor, Any] = self._own.parts
        return parts


def _place(name: str, entry: StoredTensor) -> tuple[int, Path, int]:
    """When a tensor is likely to be asked for: the embedding, layer after layer, the rest; as they lie in their files."""
    layer = _LAYER.search(name)
    rank = int(layer[1]) if layer else -1 if _FIRST.search(name) else 2**30
    return rank, entry.path, entry.offset
