"""CUDA kernels on a host processor: their own sources, compiled by the system's C++ compiler against an emulation; and workers
whose pools lie in one process, as devices that write into each other's memory."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from triblade.disagg.cuda_ipc import Offer
from triblade.disagg.sockets import TcpConnector
from triblade.errors import UnsupportedError
from triblade.ops.cuda.device import Grid, source_text
from triblade.ops.cuda.rows import RowKernels

HEADER = Path(__file__).with_name("cuda_emulation.h")
KERNEL = re.compile(r"^KERNEL\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", re.MULTILINE)


@cache
def library(source: str, constants: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    """A source file, compiled with its constants."""
    text = source_text(source)
    exports = "".join(f"EXPORT({name})\n" for name in KERNEL.findall(text))
    program = f'#include "{HEADER}"\n{text}\n{exports}'
    key = hashlib.sha256((program + repr(constants) + HEADER.read_text()).encode()).hexdigest()[:16]
    path = folder / f"{Path(source).stem}-{key}.so"
    if not path.exists():
        (folder / f"{key}.cpp").write_text(program)
        defines = [f"-D{name}={int(value)}" for name, value in constants]
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE", *defines]
        subprocess.run(["g++", *flags, "-o", path, folder / f"{key}.cpp"], check=True, timeout=120)
    return ctypes.CDLL(str(path))


class EmulatedDevice:
    """See `triblade.ops.cuda.device.Device`."""

    def __init__(self, folder: Path, *, has_warpgroups: bool = True) -> None:
        self._folder = folder
        self.has_warpgroups = has_warpgroups

    def kernel(self, source: str, name: str, constants: Mapping[str, int]) -> Any:
        return getattr(library(source, tuple(sorted(constants.items())), self._folder), f"launch_{name}")

    def box_map(
        self, tensor: Tensor, first: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> ctypes.Array[ctypes.c_uint64]:
        return (ctypes.c_uint64 * 16)(tensor.data_ptr() + first, *sizes, 1, *strides, *box)

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        overlaps: bool = True,
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        kernel((ctypes.c_uint * 3)(*grid), ctypes.c_uint(threads), addresses)

    def gather(self, run: Callable[[], None]) -> int:
        """Kernels are compiled when they are launched."""
        return 0


@cache
def _device() -> tuple[EmulatedDevice, TemporaryDirectory[str]]:
    folder = TemporaryDirectory()
    return EmulatedDevice(Path(folder.name)), folder


class EmulatedMemory:
    """Implements `disagg.cuda_ipc.RowMemory` within a process; steps are done when they return, and one launch runs at a time."""

    one_at_a_time = threading.Lock()

    def __init__(self, connector: EmulatedIpcConnector) -> None:
        self._connector = connector

    def offer(self, memory: Tensor) -> Offer:
        return Offer(handle="", offset=0, size=memory.nbytes, process=0, address=memory.data_ptr())

    def open(self, offer: Offer) -> int:
        if (reason := self._connector.why_closed) is not None:
            raise UnsupportedError(reason)
        self._connector.num_open += 1
        return offer.address

    def close(self, offer: Offer, address: int) -> None:
        assert offer.address == address
        self._connector.num_open -= 1

    def kernels(self, pool: Tensor) -> RowKernels:
        return RowKernels(_device()[0], pool)

    def mark(self) -> None:
        """Nothing is under way."""

    def wait(self, mark: object) -> None:
        """Nothing to wait for."""

    @contextmanager
    def queue(self) -> Iterator[None]:
        with self.one_at_a_time:
            yield


class EmulatedIpcConnector(TcpConnector):
    """Links over Unix sockets, and pools that are open to each other (or not, if there is a reason)."""

    def __init__(self, why_closed: str | None = None) -> None:
        self.why_closed = why_closed
        self.num_open = 0  # pieces of memory

    def row_memory(self, pool: Tensor) -> EmulatedMemory:
        return EmulatedMemory(self)
