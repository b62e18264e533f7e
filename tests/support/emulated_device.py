"""CUDA kernels on a host processor: their own sources, compiled by the system's C++ compiler against an emulation."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from triblade.ops.cuda.device import Grid, source_text

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
