"""What this machine reaches, measured in a few seconds and kept: bandwidth of its memory and rates of its products.

On a CPU the native kernels are timed where they are, those for 16-bit weights, too; without them torch is. Of a GPU the
memory is read and the rest taken from its data sheet. Numbers are medians of short runs; what was measured while others used the
processor is not kept. Invariant: no run lasts longer than `SECONDS`, none takes more than `BYTES` of memory.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from triblade import host
from triblade.bench.cores import Cores
from triblade.config import cache_dir, from_mapping
from triblade.engine.native_program import native_module
from triblade.errors import UnsupportedError
from triblade.ops.packing import PackedMatrix, QuantizedMatrix, pack_dense, pack_quantized
from triblade.tune.hardware import GB, TERA, Hardware, find_hardware, hardware_names

PROFILE = "hardware.json"  # under the folder of downloads
SECONDS = 0.8
BYTES = 256 * 2**20
ROWS, WIDTH, GROUP = 64, 1024, 64  # of the product that is timed
VERSION = 3
MOST_BUSY = 0.1  # share of the cores that others may use while a profile is measured that is worth keeping

log = logging.getLogger(__name__)


def this_machine(folder: Path | None = None) -> Hardware:
    """The profile of this machine, measured if it was not, or while others used it, or if the machine has changed.

    Raises:
        UnsupportedError: it has a GPU that there is no data sheet of.
    """
    path = (folder or cache_dir()) / PROFILE
    found = _read(path)
    if found is not None:
        return found
    cores = Cores()
    measured = _gpu() if torch.cuda.is_available() else _cpu(host.usable_cores())
    busy = cores.others(cores.own)
    if measured.kind == "cpu" and busy > MOST_BUSY * (psutil.cpu_count() or 1):
        log.warning("others kept %.1f cores busy while this machine was measured: its figures are not kept", busy)
        return measured
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": _identity(), "profile": asdict(measured)}), encoding="utf-8")
    return measured


def _read(path: Path) -> Hardware | None:
    """A kept profile, if it is of this machine; memory is looked at again, since others take and leave it."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["machine"] != _identity():
            return None
        profile = from_mapping(Hardware, kept["profile"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return replace(profile, memory_gb=host.memory().available_bytes / GB) if profile.kind == "cpu" else profile


def _identity() -> list[str]:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return [str(VERSION), platform.machine(), platform.processor(), str(host.usable_cores()), device]


def _cpu(cores: int) -> Hardware:
    bandwidth, int8, float16 = _bandwidth(cores), _int8_rate(cores), _float16_rate(cores)
    kernels = "the native kernels" if native_module() is not None else "torch"
    return Hardware(
        name=f"this machine's CPU, {cores} cores",
        kind="cpu",
        cores=cores,
        memory_gb=host.memory().available_bytes / GB,
        bandwidth_gb_s=bandwidth / GB,
        float16=float16 / TERA,
        int8=(int8 or float16) / TERA,
        label="measured",
        source=f"medians of runs of {SECONDS} s with {kernels}",
    )


def _gpu() -> Hardware:
    """The data sheet with the memory that is free.

    Raises:
        UnsupportedError: there is none.
    """
    name = torch.cuda.get_device_name(0)
    for known in hardware_names():
        sheet = find_hardware(known)
        if known.partition("-")[0] in name.lower().replace(" ", "") and sheet.kind == "cuda":
            return replace(sheet, memory_gb=torch.cuda.mem_get_info(0)[0] / GB)
    raise UnsupportedError(
        f"no data sheet of this GPU: {name}", hint=f"name the nearest with --hardware: {', '.join(hardware_names())}"
    )


def _bandwidth(cores: int) -> float:
    """Bytes per second that all cores read together, each a part of its own."""
    parts = torch.ones(cores, BYTES // 8 // cores, dtype=torch.int64)
    with _torch_threads(1):
        return BYTES * _runs_per_s(cores, lambda core: parts[core].max())


def _int8_rate(cores: int) -> float:
    """Operations per second of the native int8 product with 4-bit weights; 0: no native kernels."""
    codes = torch.randint(0, 16, (WIDTH, WIDTH), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    matrix = QuantizedMatrix(
        codes=codes,
        scales=torch.full((WIDTH, WIDTH // GROUP), 0.01, dtype=torch.float16),
        offsets=None,
        bits=4,
        bias=None,
    )
    return _native_rate(cores, pack_quantized(matrix))


def _float16_rate(cores: int) -> float:
    """The same with bfloat16 weights: of the native product, or of torch's where there is none."""
    right = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
    if native := _native_rate(cores, pack_dense(right, None)):
        return native
    left = torch.ones(ROWS * 8, WIDTH, dtype=torch.bfloat16)
    with _torch_threads(cores):
        return 2.0 * len(left) * WIDTH * WIDTH * _runs_per_s(1, lambda _: left @ right)


def _native_rate(cores: int, packed: PackedMatrix) -> float:
    """Of ROWS inputs times a matrix: one core's, times cores; 0: no native kernels."""
    native = native_module()
    if native is None:
        return 0.0
    product = _Product(native, packed)
    return 2.0 * cores * ROWS * WIDTH * WIDTH * _runs_per_s(1, lambda _: product.run())


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Product:
    """A product: rows of inputs, in all forms that kernels read, times a packed matrix."""

    def __init__(self, native: object, packed: PackedMatrix) -> None:
        self._keep: list[Tensor] = [
            torch.ones(ROWS, WIDTH, dtype=torch.int8),
            torch.ones(ROWS, WIDTH // GROUP),
            torch.ones(ROWS, WIDTH // GROUP, dtype=torch.int32),
            torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16),
            torch.zeros(ROWS, WIDTH),
        ]
        self._packed, self._out = packed, torch.empty(ROWS, WIDTH)
        parts = (0 if p is None else p.data_ptr() for p in (packed.weights, packed.scales, packed.offsets, packed.bias))
        self._matrix = native.matrix(int(packed.format), packed.num_rows, packed.num_inputs, packed.group, *parts)  # type: ignore[attr-defined]
        self._inputs = native.Activations(*(tensor.data_ptr() for tensor in self._keep))  # type: ignore[attr-defined]
        self._kernels = native.kernels(native.isa(""))  # type: ignore[attr-defined]

    def run(self) -> None:
        """Once, on this thread."""
        blocks = -(-self._packed.num_rows // 16)
        self._kernels.linear(self._matrix, self._inputs, ROWS, 0, (0, blocks), self._out.data_ptr(), WIDTH)


def _runs_per_s(threads: int, work: Callable[[int], object]) -> float:
    """Median rate of rounds in which every thread does its work once."""
    seconds: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end or len(seconds) < 3:
            start = time.perf_counter()
            list(pool.map(work, range(threads)))
            seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds)
